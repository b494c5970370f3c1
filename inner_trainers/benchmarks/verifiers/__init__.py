"""Verifiers: functions of a row and a completion that say how right the completion is."""
