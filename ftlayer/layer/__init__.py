"""The core: which record is pending, failed, waiting for its replay, or dead. Pure rules over a store.

`ftlayer.layer.layer` has the class `FTLayerCore`, `ftlayer.layer.calls` the contract. Nothing is re-exported
here: workers import the contract, and must not load the compiled tables with it.
"""
