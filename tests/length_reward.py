"""A reward by which a random toy's responses differ."""


def score(response, example):
    return {"reward": len(response) % 7 / 7, "accuracy": float("a" in response), "format": len(response) % 3 / 3}
