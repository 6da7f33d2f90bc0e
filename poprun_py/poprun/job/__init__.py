"""See a job from its plan to its end: snapshot, policy, decision, action."""
