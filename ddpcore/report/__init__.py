"""Tables and plots of measurements, from plain records and without torch."""
