"""The core: which record is pending, failed, waiting for its replay, or dead. Pure rules over a store.

`ftlayer.vertex.rules.layer` has the class `FTLayerCore`, `ftlayer.vertex.calls` the contract. Nothing is re-exported
here: workers import the contract, and must not load the compiled tables with it.
"""
