"""The run's secret, and the handshake by which processes of a run recognise each other."""
