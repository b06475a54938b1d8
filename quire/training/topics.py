"""What questions are about while texts for a head are made (`questions.py`): short lists of our own, by kind.

Many subjects matter more than many phrasings: a head remembers what a model says of a subject that it saw often, and
then guesses worse on all others.
"""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";") if part.strip())


SUBJECTS = listed("""
photosynthesis; the water cycle; climate change; renewable energy; solar panels; wind turbines; nuclear power;
electric cars; hydrogen fuel; batteries; semiconductors; transistors; lasers; radio waves; microwaves; X-rays; sound;
light; color; heat; friction; gravity; inertia; magnetism; electricity; static electricity; atoms; molecules; chemical
bonds; acids and bases; rust; fire; the periodic table; metals; plastic; glass; concrete; crystals; diamonds; gold;
oil; coal; natural gas; fossils; rocks; soil; sand; glaciers; icebergs; rivers; lakes; wetlands; the ocean; ocean
currents; coral reefs; mangroves; rainforests; deserts; savannas; the tundra; mountains; caves; islands; earthquakes;
volcanoes; tsunamis; hurricanes; tornadoes; thunderstorms; fog; snow; hail; rainbows; the seasons; the atmosphere; the
ozone layer; the greenhouse effect; the carbon cycle; biodiversity; invasive species; endangered animals; pollination;
bees; butterflies; ants; spiders; beetles; earthworms; frogs; snakes; turtles; crocodiles; lizards; sharks; whales;
dolphins; octopuses; jellyfish; salmon; penguins; owls; eagles; parrots; hummingbirds; migration of birds; bats;
wolves; bears; foxes; lions; tigers; elephants; giraffes; horses; cows; sheep; goats; pigs; chickens; rabbits;
hamsters; dogs; cats; monkeys; gorillas; kangaroos; pandas; dinosaurs; mammoths; evolution; natural selection; DNA;
genes; chromosomes; cells; stem cells; mitochondria; proteins; enzymes; hormones; bacteria; viruses; fungi; mushrooms;
algae; moss; ferns; flowers; trees; seeds; roots; fruit; grass; cactuses; the human heart; the lungs; the brain; the
liver; the kidneys; the stomach; bones; muscles; joints; skin; hair; teeth; eyes; ears; the nervous system; the immune
system; blood; blood pressure; blood types; cholesterol; insulin; diabetes; asthma; allergies; migraines; anemia;
arthritis; the common cold; influenza; measles; malaria; vaccines; antibiotics; painkillers; vitamins; minerals;
protein; fiber; sugar; salt; caffeine; alcohol; sleep; dreams; memory; attention; emotions; fear; anger; happiness;
stress; anxiety; depression; empathy; habits; motivation; procrastination; self-esteem; body language; personality;
intelligence; creativity; meditation; mindfulness; yoga; stretching; first aid; nutrition; calories; metabolism;
fasting; vegetarianism; food allergies; fermentation; cheese; bread; chocolate; honey; olive oil; rice; pasta;
potatoes; tomatoes; garlic; spices; coffee; tea; wine; beer; soup; salads; sushi; pizza; curry; the Stone Age; the
Bronze Age; ancient Egypt; ancient Greece; ancient Rome; the Roman army; the Vikings; the Middle Ages; knights;
castles; the Black Death; the Crusades; the Silk Road; the Mongol Empire; the Ottoman Empire; the Inca Empire; the
Aztecs; the Maya; the Renaissance; the Reformation; the printing press; the Age of Exploration; colonialism; slavery;
the Enlightenment; the American Revolution; the French Revolution; Napoleon; the Industrial Revolution; the American
Civil War; the First World War; the Great Depression; the Second World War; the Cold War; the space race; the fall of
the Berlin Wall; apartheid; the civil rights movement; women's suffrage; the United Nations; the European Union; NATO;
democracy; monarchy; communism; capitalism; socialism; federalism; constitutions; elections; political parties; the
separation of powers; courts; juries; laws; contracts; copyright; patents; human rights; citizenship; immigration;
taxes; inflation; interest rates; unemployment; supply and demand; monopolies; globalization; trade; tariffs; the
stock market; bonds; mutual funds; banks; credit cards; credit scores; loans; insurance; pensions; budgets;
cryptocurrency; startups; franchises; marketing; branding; advertising; customer service; supply chains; project
management; leadership; teamwork; negotiation; remote work; job interviews; resumes; networking; public speaking; time
management; email etiquette; ethics; philosophy; stoicism; existentialism; logic; free will; religion; Buddhism;
Hinduism; Islam; Judaism; Christianity; mythology; Greek gods; Norse myths; folk tales; fables; poetry; sonnets;
haiku; novels; science fiction; mystery stories; fantasy; biographies; Shakespeare; Homer; theater; opera; ballet;
jazz; blues; rock music; hip-hop; folk music; classical music; Mozart; Beethoven; the piano; the guitar; the violin;
drums; singing; painting; watercolors; sculpture; pottery; photography; architecture; Gothic cathedrals; bridges;
skyscrapers; fashion; knitting; sewing; woodworking; film making; animation; comics; video games; board games; chess;
card games; puzzles; magic tricks; the Olympic Games; football; basketball; baseball; cricket; tennis; golf; swimming;
running; cycling; climbing; skiing; surfing; sailing; martial arts; gymnastics; dancing; gardening; composting;
beekeeping; bird watching; camping; hiking; fishing; travel; maps; compasses; time zones; the calendar; languages;
grammar; alphabets; sign language; translation; dictionaries; libraries; museums; schools; universities; online
courses; homework; exams; mathematics; fractions; decimals; percentages; negative numbers; prime numbers; algebra;
equations; geometry; triangles; circles; the Pythagorean theorem; trigonometry; calculus; derivatives; integrals;
vectors; matrices; probability; statistics; averages; graphs; sets; infinity; pi; binary numbers; computers; the CPU;
memory chips; hard drives; operating systems; files and folders; the internet; web browsers; search engines; email;
Wi-Fi; Bluetooth; GPS; smartphones; cloud computing; databases; spreadsheets; programming; algorithms; recursion;
sorting; data structures; linked lists; hash tables; stacks and queues; binary trees; object-oriented programming;
functional programming; version control; Git; unit tests; debugging; APIs; HTML; CSS; JavaScript; Python; Java; SQL;
Linux; open source software; encryption; passwords; two-factor authentication; phishing; computer viruses; privacy;
cookies on websites; social media; artificial intelligence; machine learning; neural networks; chatbots; robots;
drones; self-driving cars; 3D printing; virtual reality; satellites; telescopes; rockets; the space station; the moon;
the sun; Mars; Jupiter; Saturn's rings; comets; asteroids; meteors; stars; galaxies; the Milky Way; black holes; the
Big Bang; dark matter; eclipses; constellations; space travel; life on other planets; trains; airplanes; helicopters;
ships; submarines; bicycles; elevators; clocks; refrigerators; vacuum cleaners; washing machines; light bulbs;
cameras; mirrors; thermometers; paper; money; stamps; volunteering; charity; friendship; marriage; parenting;
childhood; adolescence; retirement; grief; manners; holidays; birthdays; weddings; festivals; superstitions; city
planning; public transport; traffic; recycling; plastic waste; air pollution; water pollution; deforestation;
overfishing; organic farming; irrigation; greenhouses; genetically modified crops; food waste; fair trade; tourism;
hotels; airports; journalism; fake news; polls
""")

TASKS = listed("""
remove rust from a bicycle; clean a cast iron pan; descale a kettle; unclog a sink; fix a leaking faucet; patch a hole
in the wall; paint a bedroom; hang a heavy picture; assemble a bookshelf; sharpen a kitchen knife; sew on a button;
iron a shirt; fold a fitted sheet; get rid of fruit flies; keep ants out of the kitchen; clean a microwave; wash a
wool sweater; remove an ink stain; clean leather shoes; organize a small closet; declutter my desk; pack a suitcase;
plan a menu for the week; cook rice without a rice cooker; bake a simple loaf of bread; make pancakes; poach an egg;
roast vegetables; grill fish; make a salad dressing; freeze fresh herbs; store potatoes; make yogurt at home; brew
better coffee; cut an onion without crying; tell when meat is done; eat more vegetables; drink more water; lose weight
slowly; gain muscle at home; stretch after a run; improve my posture; reduce back pain from sitting; train for a five
kilometer run; learn to swim as an adult; learn to ride a bike; start doing yoga; wake up earlier; stop biting my
nails; quit smoking; spend less time on my phone; stop procrastinating; focus while studying; take better notes;
remember names; read more books; read faster; memorize a poem; prepare for a math exam; write an essay; write a cover
letter; write a good introduction; cite a source; give a presentation without fear; make small talk; make friends in a
new town; keep in touch with old friends; apologize to a friend; say no politely; give honest feedback; handle
criticism; deal with a difficult coworker; run a short meeting; manage a small team; ask for help at work; resign from
a job; change careers at forty; find a job abroad; negotiate a salary; start a small business; name a company; find my
first customers; write a business plan; set prices for handmade things; open a bank account; make a budget; save for a
house; pay off a credit card; start investing; file my taxes; read a pay slip; avoid scams; choose a strong password;
back up my photos; speed up an old laptop; free up space on my phone; connect to a printer; set up a home network;
make a simple website; start a blog; record a podcast; edit a video; take good portraits; photograph the night sky;
learn to draw; paint with watercolors; learn to play the guitar; tune a violin; read sheet music; write a song; write
a short story; create a character; overcome writer's block; publish a book; learn Spanish; improve my English
pronunciation; learn a new alphabet; practice a language every day; teach a child to read; explain fractions to a
child; help with homework; calm a crying baby; get a toddler to eat vegetables; talk to teenagers; limit screen time;
choose a school; plan a birthday party; organize a family reunion; write wedding vows; wrap a gift; choose a gift for
my father; decorate a small flat; save electricity; save water; insulate windows; start a compost heap; grow tomatoes
on a balcony; grow basil indoors; prune roses; keep house plants alive; repot a plant; plant a tree; attract birds to
the garden; keep slugs away from lettuce; mow a lawn; build a raised bed; train a puppy; walk two dogs; trim a cat's
claws; introduce two cats; clean a fish tank; care for a rabbit; change a flat tire; check the oil of a car;
jump-start a car; parallel park; drive in snow; buy a used car; save fuel; pack for a camping trip; pitch a tent;
light a campfire; read a map; use a compass; hike safely alone; treat a blister; treat a small burn; stop a nosebleed;
lower a fever; remove a splinter; recognize a stroke; prevent sunburn; find cheap flights; travel with a baby; avoid
jet lag; get a passport; pack light; learn chess openings; win at checkers; juggle three balls; do a card trick; fold
a paper plane; build a kite; solve a sudoku; host a game night; start a book club; volunteer in my town; write to a
politician; register to vote; fact-check a news story; convert units in my head; calculate a tip; work out a
percentage; solve a quadratic equation; find the area of a circle; convert a fraction to a decimal; install Python;
sort a list in Python; read a file in Python; undo a commit in Git; merge two spreadsheets; make a pivot table; write
a regular expression; debug a program; learn programming from scratch; center an element with CSS; connect to a
database; schedule a script; set up a virtual environment; test a web page
""")

TROUBLES = listed("""
I argue with my sister a lot; My roommate never does the dishes; My boss gives me too much work; A coworker takes
credit for my ideas; I was not invited to a friend's wedding; I forgot my anniversary; My neighbor plays loud music at
night; My dog barks when I leave the house; My cat scratches the sofa; My son is afraid of the dark; My daughter
refuses to go to school; My parents do not like my partner; I feel tired all day; I cannot concentrate at work; I am
nervous before exams; I failed my driving test; I lost my job last week; I spend too much money on clothes; I have too
many debts; I do not know what to study; I am bored at my job; I get angry quickly; I feel homesick; I miss my old
friends; I am shy at parties; I compare myself to others; I am afraid of flying; I have a headache after using the
computer; My back hurts when I sit; I eat too many sweets; I never finish what I start; I always arrive late; My
plants keep dying; My phone battery drains fast; My laptop is very slow; My internet connection keeps dropping; My car
makes a strange noise; My bread does not rise; My cake is always dry; My rice gets sticky; My roses have yellow
leaves; There are moths in my closet; The bathroom smells of mold; My shoes smell; My white shirts turned gray; I have
to give a toast at a wedding; I have to cook for ten people; I am visiting my in-laws for the first time; I start a
new job on Monday; I want to leave my job but need the money; I have two job offers; My best friend lied to me; My
friend owes me money; My father is in the hospital; My grandmother is lonely; I want to be more confident; I want to
eat healthier but have little time; I want to learn an instrument at fifty; I want to write a novel; I have an exam in
two weeks; I have a free afternoon; I have only twenty euros left this week; I am moving in with my partner; I work
from home and feel isolated; I cannot get along with my teacher; My team misses every deadline; My employees do not
talk to each other; A customer left a bad review; My small shop has few visitors; I was overcharged at a restaurant;
My package never arrived; My flight was cancelled; I lost my passport abroad; I locked myself out; The heating does
not work; My landlord wants to raise the rent; I found a wallet on the street; I saw a student cheat; I dream of
living abroad; My child has an imaginary friend; My child tells lies; My teenager is always on the phone; My baby
wakes up every hour; I have no appetite; I get nervous when I speak English; I keep forgetting words; I talk too fast;
I cannot say no; I worry about the future; I regret my choice of studies; My partner snores; We never agree on
holidays
""")

WHYS = listed("""
leaves change color in autumn; ice floats on water; onions make us cry; we yawn; we dream; dogs wag their tails; birds
sing in the morning; bees make honey; zebras have stripes; flamingos are pink; the ocean is salty; the moon has
phases; stars twinkle; thunder comes after lightning; snow is white; metal feels cold; bread rises; popcorn pops; soap
cleans; batteries run out; magnets attract iron; airplanes leave white trails; boats float; bridges have gaps; roads
crack in winter; people have accents; we need money; prices rise; wars begin; empires fall; languages die; people move
to cities; countries have flags; some people are left-handed; babies cry; teenagers sleep late; old people forget
things; we get goosebumps; we blush; muscles get sore; we sweat; fingers wrinkle in water; we sneeze; hair turns gray;
we laugh; music makes us happy; people like scary movies; children ask so many questions; people believe rumors;
habits are hard to break; breakfast is called important; exercise makes us feel good; sugar is addictive; coffee keeps
us awake; plants need light; cactuses have spines; trees have rings; roots grow down; sunflowers follow the sun; grass
is green; apples turn brown; milk goes sour; eggs get hard when cooked; salt melts ice; water boils sooner on
mountains; the days are longer in summer; deserts are cold at night; rivers bend; mountains form; volcanoes erupt; the
wind blows; clouds are gray; planets are round; Mars is red; Pluto is not a planet; astronauts float; rockets have
stages; computers use binary; phones get hot; software has bugs; passwords should be long; websites use cookies; ads
follow us around; keyboards are not in order of the alphabet; clocks go clockwise; a year has twelve months; we shake
hands; brides wear white; judges wear robes; pirates wore eye patches; Rome fell; the pyramids were built; the
dinosaurs died out; the Titanic sank; Venice is sinking; Greenland is icy
""")

PAIRS = listed("""
a crocodile and an alligator; a virus and a bacterium; weather and climate; mass and weight; speed and velocity; heat
and temperature; an alloy and a pure metal; a comet and an asteroid; a planet and a star; a frog and a toad; a
butterfly and a moth; a rabbit and a hare; a dolphin and a porpoise; a fruit and a vegetable; butter and margarine;
baking soda and baking powder; jam and jelly; white rice and brown rice; espresso and filter coffee; stock and broth;
frying and roasting; sea salt and table salt; whole milk and skim milk; beer and ale; a leasing contract and a loan; a
debit card and a credit card; stocks and bonds; gross and net income; a recession and a depression; saving and
investing; a senator and a representative; a republic and a monarchy; a law and a regulation; a crime and a tort; an
immigrant and a refugee; England and Great Britain; a city and a town; a hill and a mountain; a sea and an ocean; a
simile and a metaphor; a novel and a novella; fiction and nonfiction; affect and effect; who and whom; a colon and a
semicolon; an adjective and an adverb; active and passive voice; jazz and blues; a violin and a viola; a musical and
an opera; acrylic and oil paint; a job and a career; a manager and a leader; a resume and a CV; a mentor and a coach;
introverts and extroverts; sympathy and empathy; guilt and shame; a habit and an addiction; a cold and the flu; a
sprain and a strain; a psychologist and a psychiatrist; cardio and strength training; a list and a tuple in Python; a
process and a thread; RAM and storage; HTTP and HTTPS; Java and JavaScript; a compiler and an interpreter; SQL and
NoSQL databases; a stack and a queue; a class and an object; an array and a linked list; a router and a modem; a
laptop and a tablet; a permutation and a combination; the mean and the mode; a rational and an irrational number; area
and perimeter; correlation and causation; a hypothesis and a theory; potential and kinetic energy; nuclear fission and
fusion; an element and a compound; mitosis and meiosis; an artery and a vein; a Roth account and a savings account;
renting and buying; a bus and a coach; a hotel and a hostel; football and rugby; checkers and chess; a hobby and a
sport; Buddhism and Hinduism; the Old and the New Testament; a myth and a legend; a duke and an earl; a hurricane and
a tornado; a swamp and a marsh; a pine and a fir; organic and conventional food
""")

PEOPLE = listed("""
Albert Einstein; Marie Curie; Isaac Newton; Galileo Galilei; Charles Darwin; Nikola Tesla; Thomas Edison; Ada
Lovelace; Alan Turing; Leonardo da Vinci; Michelangelo; Vincent van Gogh; Pablo Picasso; Frida Kahlo; Claude Monet;
Johann Sebastian Bach; Frederic Chopin; Louis Armstrong; Elvis Presley; Jane Austen; Charles Dickens; Mark Twain; Leo
Tolstoy; Victor Hugo; Ernest Hemingway; Virginia Woolf; Agatha Christie; Franz Kafka; Socrates; Plato; Aristotle;
Confucius; Immanuel Kant; Julius Caesar; Cleopatra; Alexander the Great; Genghis Khan; Joan of Arc; Queen Victoria;
George Washington; Abraham Lincoln; Winston Churchill; Mahatma Gandhi; Nelson Mandela; Martin Luther King; Rosa Parks;
Florence Nightingale; Mother Teresa; Amelia Earhart; Neil Armstrong; Christopher Columbus; Marco Polo; Ferdinand
Magellan; James Cook; Simon Bolivar; Catherine the Great; Peter the Great; Otto von Bismarck; Rosalind Franklin; Louis
Pasteur; Gregor Mendel; Archimedes; Pythagoras; Euclid; Carl Friedrich Gauss; Stephen Hawking; Jane Goodall; Rachel
Carson; Henry Ford; Coco Chanel; Charlie Chaplin; Pele; Muhammad Ali; Usain Bolt; Serena Williams
""")

COUNTRIES = listed("""
France; Germany; Italy; Spain; Portugal; Greece; Poland; Sweden; Finland; Denmark; Ireland; Scotland; the Netherlands;
Belgium; Switzerland; Austria; Hungary; Romania; Ukraine; Russia; Turkey; Egypt; Morocco; Nigeria; Ghana; Kenya;
Ethiopia; South Africa; Iran; Iraq; Israel; Saudi Arabia; India; Pakistan; Nepal; China; Mongolia; Japan; South Korea;
Vietnam; Thailand; Indonesia; the Philippines; New Zealand; Canada; Mexico; Cuba; Guatemala; Colombia; Peru; Chile;
Argentina; Brazil; Iceland
""")

CITIES = listed("""
Paris; London; Rome; Berlin; Madrid; Barcelona; Vienna; Prague; Budapest; Athens; Istanbul; Cairo; Marrakesh; Nairobi;
Cape Town; Dubai; Mumbai; Delhi; Bangkok; Singapore; Hanoi; Hong Kong; Beijing; Shanghai; Seoul; Tokyo; Kyoto; Sydney;
Melbourne; Auckland; San Francisco; Los Angeles; Chicago; New York; Boston; Toronto; Montreal; Mexico City; Havana;
Lima; Buenos Aires; Rio de Janeiro; Amsterdam; Brussels; Copenhagen; Stockholm; Helsinki; Edinburgh; Dublin; Venice;
Florence; Porto; Krakow
""")

DISHES = listed("""
vegetable soup; tomato soup; chicken curry; fried rice; pad thai; tacos; burritos; chili; lasagna; spaghetti
carbonara; risotto; gnocchi; pizza dough; focaccia; banana bread; apple pie; cheesecake; brownies; oatmeal cookies;
pancakes; waffles; an omelette; scrambled eggs; quiche; ratatouille; onion soup; beef stew; meatballs; roast chicken;
mashed potatoes; potato salad; coleslaw; Greek salad; hummus; falafel; shakshuka; couscous; paella; gazpacho;
guacamole; salsa; grilled salmon; fish and chips; sushi rolls; miso soup; ramen; dumplings; stir-fried vegetables;
tofu scramble; veggie burgers; granola; a smoothie; lemonade; hot chocolate; rice pudding; tiramisu; chocolate mousse;
fruit salad; pumpkin soup; stuffed peppers
""")

SITUATIONS = listed("""
a birthday party for a six-year-old; a first date; a picnic in the park; a team building day; a long car ride; a
school science fair; a small wedding; a garden party; a gift under twenty dollars; a present for a teacher; a healthy
lunch box; a quick dinner after work; a vegetarian barbecue; a home office; a small balcony; a tiny kitchen; a
children's room; a winter evening; a hot summer day; a weekend without internet; a family holiday; a class trip; a
farewell party; a fundraiser; a charity run; a science project; a history presentation; a short film; a fantasy novel;
a podcast; a blog about food; an Instagram account; a small online shop; a coffee shop; a bookstore; a flower shop; a
dog walking service; a mobile app; a board game; a video game; a pet's name; a band name; a team name; a boat name; a
slogan for a bakery; a New Year's resolution; a morning routine; an evening routine; a workout at home; a walk with a
dog; a lesson about space; a lesson about fractions; an English lesson; a job in nature; a career with animals; a side
job for students; a hobby for retirees; an activity with grandparents; a game for the classroom; a game for two
people; a date night at home; a Halloween costume; a holiday card; a mural; a photo project; a time capsule; a
treasure hunt; a costume from cardboard; using old jars; using leftover rice; using ripe bananas; saving energy at
home; reducing plastic; meeting new people; surprising my wife; cheering up a friend; thanking a nurse; welcoming a
new neighbor; saying goodbye to a colleague; staying active in old age
""")

CLAIMS = listed("""
homework should be abolished; children should learn to code; zoos are cruel; everyone should learn an instrument;
voting should be mandatory; school uniforms are a good idea; the workweek should have four days; social media does
more harm than good; space travel is worth its cost; robots will take our jobs; nuclear energy is the future; meat
should be taxed; public transport should be free; exams are unfair; museums should be free; reality shows are bad for
us; books are better than films; cats are better pets than dogs; money makes people happy; life was better before the
internet; phones should be banned in class; tourists harm cities; fast food should be taxed; everyone should do a year
of service; art can change the world; history repeats itself; animals have rights; cash will disappear; handwriting
still matters; sport brings people together; talent matters more than practice; failure is useful; competition is
healthy; lying is sometimes right; privacy is more important than safety; news should be neutral; people can change;
luck matters more than work; cities are better than villages; grades should be abolished; people should eat less
sugar; parents should limit screen time; advertising should be limited; artists should be paid by the state; we should
colonize Mars; endangered languages should be saved
""")
