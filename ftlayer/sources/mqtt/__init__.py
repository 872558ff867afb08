"""Topics of MQTT as a source."""
