"""The FTLayer: which record is pending, failed, waiting for its replay, or dead. Pure rules over a store."""
