"""How questions are phrased while texts for a head are made (`questions.py`): {} is one of `topics.py`."""

from __future__ import annotations

from quire.training import topics

OF_SUBJECTS = (
    "What is the most important thing to know about {}?", "What are the benefits of {}?", "Can you explain {}?",
    "Explain {} in simple words.", "Explain {} to a child.", "Why does {} matter?", "Tell me about {}.",
    "Tell me something interesting about {}.", "Give me five facts about {}.", "What should I know about {}?",
    "Write a short story about {}.", "Write a poem about {}.", "Write a haiku about {}.", "Where does {} come from?",
    "What is the history of {}?", "List three common misunderstandings about {}.", "How can I learn more about {}?",
    "What are the pros and cons of {}?", "Can you recommend a book about {}?",
    "I know nothing about {}. Where do I begin?", "Describe {} in two sentences.", "Compare {} with {}.",
    "How do {} and {} belong together?", "How would you explain {} to my grandmother?",
    "Write an email to a colleague about {}.", "Write a paragraph about {}.", "Write a short essay about {}.",
    "What questions could come up in a test about {}?", "Give me a fun fact about {}.", "How do experts study {}?",
    "Write a dialogue between two people who talk about {}.", "Give an example of {}.",
    "Make an outline for a talk on {}.", "Who are well known people when it comes to {}?", "Define {}.",
    "How has {} changed in the last fifty years?", "Suggest a title for an article about {}.",
    "What is new about {}?", "Create a quiz with three questions about {}.", "What would happen without {}?",
    "Should schools teach {}?", "What role does {} play in daily life?", "What problems are there with {}?",
    "What is the future of {}?", "Give me a short overview of {}.", "What are the main parts of {}?",
    "Which myths about {} are wrong?", "Write a tweet about {}.", "Write the introduction of a blog post on {}.",
    "Teach me the basics of {}.", "Make a table of important terms about {}.", "Why do people care about {}?",
    "I have to write a report on {}. Help me.", "How is {} related to {}?", "What is the best thing about {}?",
    "Is it true that nobody fully understands {}?", "Write a joke about {}.", "Write a rhyme about {} and {}.",
    "Summarize what you know about {}.", "What is a good analogy for {}?", "How do I talk about {} with children?",
    "What skills does one need for {}?",
)
OF_TASKS = (
    "How do I {}?", "How can I {}?", "What is the best way to {}?", "Can you tell me how to {}?",
    "I want to {}. Where do I start?", "Give me some tips on how to {}.", "Explain step by step how to {}.",
    "What do I need to {}?", "How long does it take to {}?", "Is it hard to {}?",
    "What mistakes do people make when they {}?", "My friend wants to {}. What would you tell them?",
    "I tried to {} but it did not work. What did I do wrong?", "What is the easiest way to {}?",
    "Write short instructions on how to {}.", "Make a checklist: how to {}.", "How do professionals {}?",
    "I have never tried to {}. Help me.", "Please help me {}.", "need to {} asap, ideas?",
)
OF_TROUBLES = (
    "{}. What should I do?", "{}. Any advice?", "{}. How can I deal with this?", "{}. What would you do?",
    "{}. Can you help me?", "{}. Is this normal?", "{}. What could be the reason?",
    "{} and I do not know what to do.", "{}. Give me three ideas.", "{}. How do I talk about it?",
    "Hi! {}. Do you have a tip for me?", "{}. Please be honest.", "{}, help!",
    "What can a person do in this case: {}?", "{}. What are my options?",
)
OF_WHYS = (
    "Why is it that {}?", "Explain why {}.", "Can you tell me why {}?", "What is the reason that {}?",
    "Do you know why {}?", "My child asked me why {}. What do I say?", "I always wondered why {}.",
    "In one paragraph, tell me why {}.", "Is there a scientific reason why {}?",
    "Write a short story that explains why {}.",
)
OF_PAIRS = (
    "What is the difference between {}?", "How do I tell {} apart?",
    "Explain the difference between {} with an example.", "Compare {}.", "Which should I know more about, {}?",
    "Are {} the same thing?", "In what ways are {} alike?",
)
OF_PEOPLE = (
    "Who was {}?", "What is {} famous for?", "Tell me about the life of {}.", "What did {} achieve?",
    "When and where was {} born?", "What can we learn from {}?", "Write a short biography of {}.",
    "Name three works or deeds of {}.", "What would {} think of our time?", "Imagine an interview with {}.",
    "What was the childhood of {} like?",
)
OF_COUNTRIES = (
    "What is the capital of {}?", "What do people eat in {}?", "What language is spoken in {}?",
    "Tell me about the history of {}.", "When is the best time to visit {}?", "How many people live in {}?",
    "What is {} known for?", "Describe the landscape of {}.", "Which countries border {}?",
    "What are some customs in {}?", "What currency is used in {}?", "Name three famous people from {}.",
    "What is the climate like in {}?", "What animals live in {}?", "Is {} expensive for tourists?",
    "What are popular sports in {}?", "How is {} governed?",
)
OF_CITIES = (
    "What should I see in {}?", "Plan a weekend in {}.", "Plan five days in {} with a small budget.",
    "Where should I stay in {}?", "What food should I try in {}?", "Is {} safe for tourists?",
    "Describe a morning in {}.", "How do I get around in {}?", "What is {} famous for?", "Write a postcard from {}.",
    "What can children do in {}?", "How is the weather in {} in spring?", "Compare {} with {}.",
    "I have one day in {}. What should I do?", "Write a travel blog post about {}.",
)
OF_DISHES = (
    "Give me a recipe for {}.", "How do I make {}?", "What goes well with {}?", "What ingredients do I need for {}?",
    "How long does it take to make {}?", "Can I make {} without eggs?", "How do I make {} healthier?",
    "How long does {} keep in the fridge?", "Where does {} come from?", "Write a menu with {} as the main course.",
    "How do I make {} for ten people?", "What is the secret of good {}?", "Is {} good for me?",
    "Describe the taste of {}.",
)
OF_SITUATIONS = (
    "Give me ideas for {}.", "Give me three ideas for {}.", "Give me ten ideas for {}.",
    "What would you suggest for {}?", "Help me with {}.", "I need something for {}. What do you recommend?",
    "Brainstorm: {}.", "Make a list for {}.", "What do I need to think of for {}?",
    "Suggest something unusual for {}.", "Make a plan for {}.", "What is popular for {}?",
    "Give me cheap ideas for {}.",
)
OF_CLAIMS = (
    "Do you think that {}?", "Is it true that {}?", "Some people say that {}. What do you think?",
    "Give me arguments for and against this: {}.", "Write a short essay: {}.", "Convince me that {}.",
    "Argue against the idea that {}.", "Why would somebody say that {}?",
    "Write a letter to a newspaper that says {}.", "Debate this with me: {}.",
)
CODE = (
    "Write a {language} function that {task}.", "Write a {language} program that {task}.",
    "Show me {language} code that {task}, and explain it.", "How do I write a function in {language} that {task}?",
    "Give me a {language} example that {task}.", "Write a {language} class that {task}.",
    "Write a unit test in {language} for a function that {task}.",
    "I need {language} code that {task}. Keep it short.", "Explain how a program {task}.",
    "Write a {language} script that {task}, with comments.",
    "Give me pseudocode for a function that {task}, then {language} code.",
)
LANGUAGES = ("Python",) * 8 + ("JavaScript",) * 3 + ("Java", "Java", "C", "C++", "C#", "Go", "Rust", "TypeScript") + (
    "Ruby", "PHP", "Bash", "Kotlin", "Swift", "R")
PROGRAMS = topics.listed("""
returns the sum of a list of numbers; finds the largest number in a list; finds the second largest number; reverses a
string; checks whether a word is a palindrome; counts the words in a text; removes duplicates from a list; sorts a
list of names; sorts dictionaries by a key; computes the factorial of a number; prints Fibonacci numbers; finds prime
numbers; checks whether a number is prime; converts Celsius to Fahrenheit; reads a file line by line; merges two
dictionaries; computes the average of a list; finds the longest word in a sentence; checks the strength of a password;
parses a date; counts the days between two dates; reads a CSV file; writes a JSON file; makes a request to a web page;
flattens a nested list; searches a sorted list; rolls two dice; shuffles a deck of cards; keeps a list of contacts;
models a bank account; models a shopping cart; prints a multiplication table; counts how often each letter occurs;
validates an email address; validates a phone number; rounds numbers to two decimals; rotates a matrix; multiplies two
matrices; transposes a table; finds common elements of two lists; generates a random password; compares two files;
computes compound interest; converts a number to binary; converts Roman numerals; finds the greatest common divisor;
swaps two variables; removes spaces from a string; capitalizes every word; splits a list into chunks; groups words by
their first letter; finds anagrams; checks balanced brackets; implements a stack; implements a queue; implements a
linked list; implements a binary search tree; implements bubble sort; implements quicksort; implements merge sort;
walks through a folder and lists its files; renames files; resizes images; downloads a file; sends an email; reads
arguments from the command line; logs messages to a file; measures how long a function takes; retries a failing call;
caches results; connects to a SQLite database; inserts a row into a table; plots a line chart; simulates a coin toss;
guesses a number with the user; plays tic-tac-toe; draws a triangle of stars; computes the distance between two
points; finds the shortest path in a graph; counts islands in a grid; solves a quadratic equation; computes a moving
average; normalizes a list of numbers; finds missing values in a table; filters even numbers; checks whether a year is
a leap year; formats a price; encrypts a text with a Caesar cipher; counts down from ten; converts seconds to hours
and minutes; translates text to Morse code; makes a to-do list; draws a circle; handles errors when dividing; removes
HTML tags from a text; finds all links in a page; parses a URL; builds a small web server; returns the current time;
picks a random quote; sums the digits of a number; zips two lists into pairs
""")
QUERIES = (
    "Write an SQL query that counts {} per {}.", "Write an SQL query that shows the newest {} of each {}.",
    "Write an SQL query that joins {} and {}.", "How do I delete old {} in SQL when they belong to {}?",
    "Write a CREATE TABLE statement for {} and {}.", "Write an SQL query that finds {} without any {}.",
    "What index would help a query for {} by {}?",
)
TABLES = (
    "orders", "products", "employees", "departments", "invoices", "students", "courses", "books", "authors", "visits",
    "patients", "doctors", "flights", "tickets", "messages", "payments", "cities", "countries", "songs", "albums",
)
WRITINGS = topics.listed("""
an email; a formal letter; a short note; a text message; a poem; a limerick; a short story; a speech; a toast; a
product description; a review; a complaint; an apology; an invitation; a reminder; a birthday card; a social media
post; a press release; a job advertisement; a diary entry; a song; a dialogue; a fairy tale; a newspaper article; a
motivational quote; a riddle; a bedtime story; a cover letter; a reference letter; a love letter; a farewell message;
an out-of-office reply
""")
READERS = topics.listed("""
to my boss; to my landlord; to a customer; to my teacher; to my students; to a colleague; to an old friend; to my
mother; to my brother; to my team; to a company; to the city council; to a hotel; to my future self; for children; for
beginners; for my website; for a newsletter; for a school magazine; for my best friend; for my partner; for a local
newspaper
""")
OCCASIONS = topics.listed("""
about a delayed delivery; about a broken washing machine; about a day off; about a change of plans; about a new
product; about a lost dog; about a found key; about a birthday; about a new baby; about a retirement; about a job well
done; about a mistake in an invoice; about a meeting next week; about a noisy street; about a summer party; about a
sick day; about a trip to the mountains; about the first snow; about a talking tree; about a brave mouse; about a
robot that wants to paint; about a dragon who is afraid of fire; about an old clock; about a lost letter; about a
train at night; about a garden in spring; about a grandmother's kitchen; about two friends who disagree; about a girl
who can hear plants; about a detective and a missing cake; about the last library on Earth; about a fisherman's luck;
about a king who could not laugh; about a school for wizards; about hope; about patience; about courage; about the
smell of rain; about a long winter; about a small town; about a new bakery; about a bicycle shop; about a course in
pottery; about healthy snacks; about a charity concert; about an internship; about a refund; about a room reservation;
about a recommendation; about a late payment; about a volunteering day; about a marathon; about my favorite teacher;
about a cat on a ship; about the sea; about a dream
""")
SPEAKERS = topics.listed("""
I; We; They; My brother; My mother; The children; Our teacher; The doctor; A young woman; The old man; My neighbors;
The manager; A student; Her husband; The farmer; Some people; Nobody; Everyone; The engineers; My best friend; The
dog; The train driver; Two tourists; The team
""")
DEEDS = topics.listed("""
bought a new bicycle; forgot the keys at home; will travel to the mountains; had to wait for an hour; wants to learn
to cook; lost an umbrella; found a letter under the door; could not open the window; wrote a long report; would like a
cup of coffee; saw a beautiful bird; has been working all day; missed the last bus; ordered a pizza; will call back
later; met an old friend; fixed the broken lamp; planted a small tree; read an interesting book; did not understand
the question; paid the bill; cannot find the museum; enjoyed the concert; moved to a bigger house; speaks three
languages; drank a glass of water; prepared dinner; was late for the meeting; took many photos; changed the plan
""")
CIRCUMSTANCES = topics.listed("""
yesterday; this morning; last week; in the evening; on Sunday; before breakfast; after work; during the holidays;
because it was raining; although it was cold; at the station; in the garden; near the river; in the city center; with
a friend; without saying a word; for the first time; again; as always; two days ago; in the middle of the night; at
the airport
""")
TONGUES = (
    "French", "French", "Spanish", "Spanish", "German", "German", "Italian", "Portuguese", "Dutch", "Polish",
    "English",
)
OF_SENTENCES = (
    "Translate into {tongue}: {sentence}", "Translate this sentence into {tongue}: {sentence}",
    "How do I say this in {tongue}? {sentence}", "What is \"{sentence}\" in {tongue}?",
    "Please translate to {tongue}.\n\n{sentence}", "Rewrite this sentence in a formal way: {sentence}",
    "Correct this sentence if needed: {sentence}", "Rewrite this in the passive voice: {sentence}",
    "Make this sentence more interesting: {sentence}", "What happens next? {sentence}",
    "Continue the story: {sentence}", "Turn this into a question: {sentence}",
    "Find the verb in this sentence: {sentence}", "Rewrite this in the future tense: {sentence}",
)
OF_TEXT = (
    "Summarize this in two sentences.\n\n{}", "Summarize the following text:\n\n{}",
    "Give me the main points of this text.\n\n{}", "Rewrite this in simple words:\n\n{}",
    "Correct the grammar of this text:\n\n{}", "What is the following text about?\n\n{}", "Make this shorter:\n\n{}",
    "Give this text a title:\n\n{}", "Ask me three questions about this text.\n\n{}",
    "Answer in one sentence: what does this text say?\n\n{}", "Turn this into a list:\n\n{}",
    "{}\n\nCan you summarize this for me?", "{}\n\nWhat are the key takeaways?",
    "Explain this text to a child:\n\n{}", "Is this text correct? Check the facts.\n\n{}",
    "Rewrite this as an email:\n\n{}", "Extract the most important words:\n\n{}",
    "Write a headline and a summary for this article.\n\n{}", "Please shorten this to three bullet points:\n\n{}",
    "Translate into French:\n\n{}", "Translate into Spanish:\n\n{}", "Translate into German:\n\n{}",
)
FOLLOW_UPS = (
    "Can you explain that in simpler words?", "Give me an example.", "Why?", "Make it shorter.",
    "Can you say more about the first point?", "What else should I know?", "Thanks! And what about {}?",
    "How does that relate to {}?", "Can you summarize that in one sentence?", "Is that always true?",
    "Write it as a list.", "What are the risks?", "Can you give me more ideas?",
    "I do not understand. Can you try again?", "Great, thank you!", "What would you do first?",
    "Rewrite it in a friendlier tone.", "Translate that into Spanish.", "How much does it cost?", "Are you sure?",
    "What is the most important part?", "Turn it into a poem.", "And for beginners?", "Now tell me about {}.",
    "What is the next step?",
)
SMALL_TALK = (
    "Hello!", "Hi there, how are you?", "Good morning!", "Who are you?", "What can you do?", "What is your name?",
    "Tell me a joke.", "Tell me a riddle.", "I am bored.", "Sing me a song.", "Do you like music?",
    "Are you a human?", "Thank you for your help!", "What day is it today?", "Can you help me with something?",
    "Let's play a game.", "Surprise me.", "Tell me something nice.", "I had a bad day.", "I had a great day!",
    "What is the meaning of life?", "Do you dream?",
)
OPENINGS = (
    "", "", "", "What", "How do I", "How does", "Why do", "Why is", "Explain", "Describe", "Write",
    "Write a story about", "Give me", "Can you", "Can you help me", "I am", "I need", "I want to", "I have", "My",
    "My friend", "My son", "If", "Please", "Hello", "Hi, I", "Who was", "Who is", "When did", "When should I",
    "Where is", "Where can I", "Is it", "Is there", "Should I", "What happens if", "What is the best",
    "What are some", "What does", "Which", "How many", "How much", "How long", "How can I", "How to", "Tell me",
    "Suggest", "List", "Create", "Make a", "Compare", "Summarize", "Rewrite", "Solve this problem step by step:",
    "Calculate", "Create a JSON object", "Write a SQL query", "Fix this code:\n```python\ndef ",
    "Write a Python function that", "Write a program", "Translate into English:", "Translate", "Answer the question:",
    "Here is a text:\n\n", "Write a product description for", "Convert", "Define", "Recommend", "Imagine", "Let's",
    "In", "The", "A", "Do you", "Does", "Are", "We are", "You are", "Act as", "Name", "Find", "Plan", "Teach me",
    "I don't understand",
)
BEFORE = (
    "Hi! ", "Hello, ", "Hey, ", "Please help. ", "Quick question: ", "I have a question. ", "I am a student. ",
    "I am a teacher. ", "I am a beginner. ", "For a school project: ", "I am curious. ", "Good evening. ",
    "Question for you: ", "Be brief. ", "Take your time. ", "I am writing a book. ", "My daughter wants to know: ",
    "We talked about this at dinner. ", "You are an expert. ", "Imagine you are my teacher. ", "As a friend: ",
    "I need this for work. ",
)
BEHIND = (
    " Please keep it short.", " Answer in one sentence.", " Answer in two or three sentences.", " Use simple words.",
    " Give an example.", " Explain step by step.", " Use bullet points.", " Make it funny.", " Be detailed.",
    " Thanks!", " Thank you in advance.", " I am ten years old.", " Give me three reasons.",
    " In about 100 words, please.", " Be friendly.", " Write it for an adult reader.", " Do not use technical terms.",
    " Include a short conclusion.", " What do you think?", " Give me a list.", " Explain your reasoning.",
    " Use a table if it helps.",
)
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.",
    "You are a helpful, honest and friendly assistant.", "Answer briefly.",
    "You are an expert who explains things clearly.", "You are a patient teacher.", "You answer in English.",
    "You are a chat assistant on a website.", "Be concise and accurate.", "You are a coding assistant.", "",
)
KINDS = (
    (22, OF_SUBJECTS, topics.SUBJECTS), (14, OF_TASKS, topics.TASKS), (9, OF_TROUBLES, topics.TROUBLES),
    (7, OF_WHYS, topics.WHYS), (6, OF_PAIRS, topics.PAIRS), (4, OF_PEOPLE, topics.PEOPLE),
    (4, OF_COUNTRIES, topics.COUNTRIES), (4, OF_CITIES, topics.CITIES), (4, OF_DISHES, topics.DISHES),
    (5, OF_SITUATIONS, topics.SITUATIONS), (4, OF_CLAIMS, topics.CLAIMS),
)
"""Weight, phrasings and topics."""
