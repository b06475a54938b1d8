// Scenarios on the server's own engine: ordinary requests to /v1/completions, all at once.

import { call } from "./api.js";

const COMMON = "A library keeps its books in stacks, and a librarian knows where each of them is. When two readers ask for "
  + "the same book on the same day, nobody prints it twice: both sit at one table and read the same page, until one of them "
  + "wants to write into the margin. Then, and only then, the page is copied. Books that nobody has asked for in a long time "
  + "go to the cellar first. Answer the question about this library in one short sentence.";
const QUESTIONS = ["Who knows where the books are?", "What happens to books nobody asks for?", "When is a page copied?",
  "May two readers read one book?", "Where is the cellar?", "Who writes into the margin?"];

const BODIES = {
  "shared-prefix": () => QUESTIONS.map((question) => ({ prompt: `${COMMON}\n\n${question}`, max_tokens: 32, ignore_eos: true })),
  samples: () => [{ prompt: COMMON, n: 4, max_tokens: 48, temperature: 1, ignore_eos: true }],
};

export async function playLive(name, signal) {
  const answers = await Promise.all(BODIES[name]().map(async (body) => (await call("/v1/completions", { body, signal })).json()));
  const sum = (pick) => answers.reduce((total, answer) => total + pick(answer.usage), 0);
  return { requests: answers.length, prompt: sum((usage) => usage.prompt_tokens), output: sum((usage) => usage.completion_tokens),
    cached: sum((usage) => usage.prompt_tokens_details.cached_tokens) };
}
