"""The vertex: what it is asked (calls), its rules, the service that runs them, and its clients."""
