"""What the faces of ftlayer (console, terminal, metrics) show of vertices and jobs, and how it is judged."""
