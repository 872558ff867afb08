"""What a vertex and the jobs that are announced to it tell a monitoring system, as plain families of samples."""
