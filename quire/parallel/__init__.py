"""How ranks that share one model talk to each other inside a step; who starts and watches them is not known here."""
