"""From a request and facts to a plan: the pure half of poprun."""
