"""In-loop controllers: rules, a policy net, both together, and schedules as baselines; how they drive a round."""
