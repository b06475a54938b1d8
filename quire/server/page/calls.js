// Tool calls of an answer: shown as calls while they are written, then each waits for what the tool returned.

export class Calls {
  constructor(body) {
    this.list = [];
    this.body = body;
    this.nodes = [];
  }

  // Pieces of calls, as the stream brings them.
  take(pieces) {
    for (const piece of pieces ?? []) {
      const call = (this.list[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += piece.function.name ?? "";
      call.function.arguments += piece.function.arguments ?? "";
    }
  }

  draw() {
    this.list.forEach((call, index) => {
      const node = (this.nodes[index] ??= this.#add());
      node.querySelector(".name").textContent = call.function.name;
      node.querySelector("pre").textContent = readable(call.function.arguments);
    });
  }

  #add() {
    const node = document.createElement("section");
    node.className = "call";
    const title = document.createElement("div");
    title.append("calls ", Object.assign(document.createElement("span"), { className: "name" }));
    node.append(title, document.createElement("pre"));
    this.body.after(node);
    if (this.nodes.length) this.nodes.at(-1).after(node);
    return node;
  }

  // Ask for the results; `done` gets them, in the order of the calls, when the last one is given.
  ask(done) {
    const results = this.list.map(() => null);
    this.nodes.forEach((node, index) => {
      const form = document.createElement("form");
      form.className = "row";
      const field = document.createElement("textarea");
      field.rows = 1;
      field.setAttribute("aria-label", `What ${this.list[index].function.name} returned`);
      field.placeholder = "what it returned";
      const button = Object.assign(document.createElement("button"), { textContent: "Return" });
      form.append(field, button);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        results[index] = field.value;
        const shown = document.createElement("pre");
        shown.className = "result";
        shown.textContent = field.value;
        form.replaceWith(shown);
        if (results.every((each) => each !== null)) done(results);
      });
      node.append(form);
    });
  }

  // Nobody will ask for the results any more.
  close() {
    this.nodes.forEach((node) => node.querySelector("form")?.remove());
  }
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still being written, or was cut off
  }
}
