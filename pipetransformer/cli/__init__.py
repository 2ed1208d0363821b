"""The command line ``pipetransformer``: one module per command.

Importing this package imports no torch: commands import what they need when they run.
"""
