"""The prompts of `quire bench speculative`: answers that repeat what they were given, and answers that do not."""

from __future__ import annotations

_CODE = '''class Inventory:
    def __init__(self, name, capacity):
        self.name = name
        self.capacity = capacity
        self.items = {}

    def add_item(self, item, quantity):
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        current = self.items.get(item, 0)
        if self.total_quantity() + quantity > self.capacity:
            raise ValueError("not enough capacity")
        self.items[item] = current + quantity

    def remove_item(self, item, quantity):
        current = self.items.get(item, 0)
        if quantity > current:
            raise ValueError("not enough items")
        self.items[item] = current - quantity

    def total_quantity(self):
        return sum(self.items.values())
'''
_REPORT = (
    "The harbour office reported on Tuesday that the ferry Aurora had left the northern pier at 6:40 in the "
    "morning with 212 passengers and a crew of nineteen. Captain Elena Markovic said that the sea was calm and "
    "that the visibility was good for the whole of the crossing. At 8:15 the ferry reached the island of "
    "Veldoren, where the passengers went ashore without any incident. The harbour office added that the next "
    "crossing would leave at 5:30 in the evening, and that tickets could be bought at the office or on board. "
    "The crossing takes about ninety minutes in good weather."
)
_BEES = (
    "Honey bees live in colonies of up to sixty thousand. In spring the queen lays up to two thousand eggs a day, and "
    "worker bees feed the larvae with pollen and nectar. A bee that has found flowers dances on the comb, and the "
    "angle of its dance tells the others where to fly. In autumn the drones are driven out, and the workers that stay "
    "keep the queen warm through the winter."
)
_TABLE = (
    "name,department,city,salary\nAnna Kovacs,Engineering,Budapest,5200\nBruno Silva,Marketing,Lisbon,4100\n"
    "Clara Schmidt,Engineering,Berlin,5900\nDavid Jensen,Finance,Copenhagen,6100\nElena Rossi,Marketing,Milan,4400\n"
    "Farid Haddad,Engineering,Paris,5600\n"
)

REPEATING = {
    "code edit": f"Rename the class Inventory to Warehouse in this code and print all of it.\n```python\n{_CODE}```",
    "code copy": f"Print this file exactly as it is.\n```python\n{_CODE}```",
    "quoting summary": f"Summarize the text by quoting its sentences word for word.\n\n{_REPORT}",
    "quotation": f"Repeat the following text word for word.\n\n{_REPORT}",
    "table": f"Print this table again as it is, then print it as a list of lines.\n\n{_TABLE}",
}
FREE = {
    "story": "Write a story about a lighthouse keeper who finds a strange map.",
    "explanation": "Explain in your own words why the sky is blue and sunsets are red.",
    "letter": "Write a letter to a friend about moving to a new city.",
    "argument": "Should cities ban cars from their centres? Give your opinion.",
}

CHAT = {
    "sleep": "I have trouble falling asleep at night. What could I try?",
    "tea and coffee": "What is the difference between green tea and black tea?",
    "first job": "How should I prepare for my first job interview at a bakery?",
    "tides": "Why does the sea have tides?",
    "weekend": "Give me five ideas for a rainy weekend with two children.",
    "thanks": "Write a short thank-you note to a neighbour who watered my plants.",
}
CODE = {
    "median": "Write a Python function that returns the median of a list of numbers.",
    "vowels": "Write a JavaScript function that counts the vowels in a string, and explain it.",
    "query": "Write an SQL query that lists the ten customers who spent most last year.",
}
SUMMARY = {
    "ferry": f"Summarize this in two sentences.\n\n{_REPORT}",
    "bees": f"Give me the main points of this text.\n\n{_BEES}",
}
TRANSLATION = {
    "french": "Translate into French: The train leaves at nine, and we will be at the sea before noon.",
    "spanish": "Translate into Spanish: My sister works in a hospital and comes home late every evening.",
}
TEXTS = {"repeating": REPEATING, "free": FREE, "chat": CHAT, "code": CODE, "summary": SUMMARY,
         "translation": TRANSLATION}
DRAWN = ("free",)
"""Texts that are drawn whatever the temperature asked for: greedy answers of a small model fall into loops."""
