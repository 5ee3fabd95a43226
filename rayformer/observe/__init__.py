"""What a run leaves behind and shows: its folder, metrics, journal and display. Reads events, decides nothing."""
