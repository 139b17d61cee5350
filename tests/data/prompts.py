"""Two hundred prompts for accuracy measures: everyday requests, in our own words."""

from __future__ import annotations

_SUBJECTS = (
    "the water cycle",
    "how a bicycle stays upright",
    "the city of Paris",
    "baking sourdough bread",
    "the French Revolution",
    "photosynthesis in green plants",
    "sorting a list of numbers",
    "saving money every month",
    "the planets of the solar system",
    "learning to play the piano",
)

_REQUESTS = (
    "Explain {} to a child in three sentences.",
    "Write a short poem about {}.",
    "What are the most important facts about {}?",
    "Give me five quiz questions about {} with their answers.",
    "Summarise what is commonly known about {} in one paragraph.",
    "Question: What should a beginner know about {}? Answer:",
    "The history of {} begins long ago, when people first",
    "Translate this title into French: An introduction to {}.",
    "Here is a list of books about {}:\n1.",
    "Dear Professor, I am writing to you because I have a question about {}. In particular,",
    'def describe():\n    """Return a sentence about {}."""\n    return',
    "User: Tell me about {}.\nAssistant: Of course! The first thing to understand is that",
    "Many people believe that {} is simple, but in fact",
    "Compare two different views on {} and say which one is better supported.",
    "Once upon a time there was a teacher who loved talking about {}. One morning,",
    "Write an e-mail inviting friends to an evening about {}.",
    "Correct the grammar of this sentence: them was reading a article about {} yesterday.",
    "The main difference between {} and the weather is that",
    "In 2019, researchers published a study about {}. They found that 45 percent of",
    "Make a table with two columns, term and meaning, for {}.\n\n| term | meaning |\n|---|---|\n|",
)

PROMPTS: tuple[str, ...] = tuple(request.format(subject) for request in _REQUESTS for subject in _SUBJECTS)
