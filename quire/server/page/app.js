// Starts the page: theme, tabs, chat, and the engine's view when somebody opens it.

import { call } from "./api.js";
import { startChat } from "./chat.js";
import { startStage } from "./stage.js";
import { startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";

let naming = null;

startTheme(document.getElementById("theme"));
startChat();
const stage = startStage();
startTabs((name) => {
  stage.show(name === "engine");
  if (name !== "engine" && !document.getElementById("model").textContent) nameModel();
});

// Asked for again when the chat is opened after a key was given elsewhere.
function nameModel() {
  naming ??= showName().finally(() => { naming = null; });
}

async function showName() {
  try {
    const models = await (await call("/v1/models")).json();
    document.getElementById("model").textContent = models.data[0].id;
    document.title = `Quire · ${models.data[0].id}`;
    document.getElementById("chat-status").textContent = "";
  } catch (error) {
    document.getElementById("chat-status").textContent = error.message;
  }
}

nameModel();
