// Scenarios on the server's own engine: an ordinary request to /v1/completions.

import { call } from "./api.js";

const COMMON = "A library keeps its books in stacks, and a librarian knows where each of them is. When two readers ask for "
  + "the same book on the same day, nobody prints it twice: both sit at one table and read the same page, until one of them "
  + "wants to write into the margin. Then, and only then, the page is copied. Books that nobody has asked for in a long time "
  + "go to the cellar first. Answer the question about this library in one short sentence.";
const QUESTIONS = ["Who knows where the books are?", "What happens to books nobody asks for?", "When is a page copied?",
  "May two readers read one book?", "Where is the cellar?", "Who writes into the margin?"];

// Prompts that shall run together go in one request: a browser opens only six connections to one server.
const BODIES = {
  "shared-prefix": { prompt: QUESTIONS.map((question) => `${COMMON}\n\n${question}`), max_tokens: 48, ignore_eos: true },
  samples: { prompt: COMMON, n: 4, max_tokens: 48, temperature: 1, ignore_eos: true },
};

export async function playLive(name, signal) {
  const body = BODIES[name];
  const { usage } = await (await call("/v1/completions", { body, signal })).json();
  return { prompts: Array.isArray(body.prompt) ? body.prompt.length : 1, prompt: usage.prompt_tokens,
    output: usage.completion_tokens, cached: usage.prompt_tokens_details.cached_tokens };
}
