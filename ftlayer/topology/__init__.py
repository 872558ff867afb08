"""Topologies as a user builds them (`StreamGraph`) and as they run (`JobGraph`). No I/O."""
