"""Everything with a device, and the wiring: command line, configuration, engines, trainer, weights, launchers.

The only package that may import torch, and each module that needs it imports it itself: `engine.cli` and
`engine.config` work without.
"""
