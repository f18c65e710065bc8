"""Batch prediction with an exported model: `flotilla predict`."""
