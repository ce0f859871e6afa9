"""The reports of replays and trainings: rewards by step, evaluations, a table and a picture."""
