// The sampling parameters of the chat: fields of the public API, left out of the request where they are empty.

const FIELDS = [
  { name: "temperature", kind: "number", min: 0, max: 2, step: 0.1, value: 0.7, help: "0 always takes the likeliest token" },
  { name: "top_p", kind: "number", min: 0.01, max: 1, step: 0.01, help: "draw from the likeliest tokens with this probability" },
  { name: "top_k", kind: "number", min: 0, step: 1, help: "draw from this many likeliest tokens" },
  { name: "min_p", kind: "number", min: 0, max: 1, step: 0.01, help: "drop tokens below this share of the likeliest" },
  { name: "max_tokens", kind: "number", min: 1, step: 1, value: 512, help: "most tokens of an answer" },
  { name: "repetition_penalty", kind: "number", min: 0.01, max: 10, step: 0.05, help: "above 1: fewer repetitions" },
  { name: "presence_penalty", kind: "number", min: -2, max: 2, step: 0.1, help: "subtracted from tokens that occurred" },
  { name: "frequency_penalty", kind: "number", min: -2, max: 2, step: 0.1, help: "the same, each time again" },
  { name: "seed", kind: "number", step: 1, help: "the same seed, the same answer" },
  { name: "stop", kind: "text", help: "end when this text appears" },
  { name: "tools", kind: "json", help: 'functions that the model may call, as JSON: [{"type": "function", "function": {"name": …}}]' },
  { name: "system", kind: "area", help: "what the model is told before the conversation" },
];

export function buildSettings(container) {
  for (const field of FIELDS) {
    const label = document.createElement("label");
    label.textContent = field.name;
    label.title = field.help;
    const tall = field.kind === "area" || field.kind === "json";
    const input = document.createElement(tall ? "textarea" : "input");
    input.id = `field-${field.name}`;
    if (tall) {
      input.rows = 2;
      label.className = "wide";
    } else {
      input.type = field.kind;
      for (const name of ["min", "max", "step"]) if (field[name] !== undefined) input[name] = field[name];
    }
    if (field.value !== undefined) input.value = field.value;
    input.placeholder = field.kind === "number" ? "default" : field.help;
    label.append(input);
    container.append(label);
  }
}

// Those that were filled in, by name; throws with the field's name where one is out of its range.
export function readSettings() {
  const found = {};
  for (const field of FIELDS) {
    const input = document.getElementById(`field-${field.name}`);
    if (!input.checkValidity()) throw new Error(`${field.name}: ${input.validationMessage}`);
    if (input.value.trim() === "") continue;
    found[field.name] = valueOf(field, input.value);
  }
  return found;
}

function valueOf(field, text) {
  if (field.kind === "number") return Number(text);
  if (field.kind !== "json") return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${field.name}: ${error.message}`);
  }
}
