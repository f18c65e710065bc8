"""Example functions for `data.map`."""

import numpy as np


def tokens(example):
    words = example["text"].split()
    return {"tokens": [len(word) for word in words], "label": example["label"], "first": words[0]}


def sets(example):
    number = int(example["number"])
    of_texts = ["ab"[number % 2]] * (number % 3)
    return {"words": [number] * (number % 3), "names": of_texts, "label": [*range(number % 3)]}


def odd_ones_left_out(example):
    return (
        {"x": example["number"] / 2, "label": example["label"]} if example["number"] % 2 else None
    )


def nothing(example):
    del example


def tokens_of_all(batch):
    return {"size": np.char.str_len(batch["text"].astype(str)), "label": batch["label"]}


tokens_of_all.batched = True


def too_few(batch):
    return {"size": batch["number"][:1], "label": batch["label"]}


too_few.batched = True


def names_of_classes(example):
    return {"x": example["number"], "label": f"class {example['number'] % 3}"}


def picture(example):
    return {"x": np.full((3, 4, 3), example["number"], np.uint8), "label": example["label"]}


def divides(example):
    return {"x": 1 / (int(example["number"]) - 7), "label": example["label"]}


def turns_into_text(example):
    x = "seven" if example["number"] == 300 else 1.0
    return {"x": x, "label": example["label"]}


def turns_into_text_soon(example):
    return {"x": "seven" if example["number"] == 7 else 1.0, "label": example["label"]}


def grows(example):
    return {"x": [1.0] * (2 if example["number"] < 300 else 3), "label": example["label"]}


def loses_one(example):
    found = {"x": 1, "y": 2, "label": example["label"]}
    if example["number"] == 300:
        del found["y"]
    return found


def a_list(example):
    return [example["number"]]


def no_value(example):
    return {"x": None, "label": example["label"]}


def whole_then_broken(example):
    return {"x": 1 if example["number"] < 5 else 1.5, "label": example["label"]}


NUMBER = 3


def of_rows(row):
    return {"name": [ord(letter) for letter in row["name"]], "old": row["age"] > 30}


def letters(example):
    return {"letters": [ord(letter) for letter in example["name"]], "label": example["label"]}


def all_of_it(example):
    assert isinstance(example["name"], str)
    assert all(isinstance(word, str) for word in example["words"])
    assert example["nested/deep/er"].dtype == np.float32
    return {"count": len(example), "image": example["image"], "label": example["label"]}
