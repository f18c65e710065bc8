"""Programs that Flotilla is measured beside, written after their published descriptions."""
