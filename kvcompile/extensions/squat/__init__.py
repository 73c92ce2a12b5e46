"""squat: keys whose error is kept out of the subspace of the prompt's queries; ``normed``: keys that are rotated and normalised."""
