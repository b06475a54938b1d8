// The API key: kept for this tab, asked for in a dialog when the server wants one.

const NAME = "quire-key";
let asking = null;

export function storedKey() {
  return sessionStorage.getItem(NAME);
}

// Resolves to false when the user would not say. Whoever asks at the same time shares one dialog.
export function askForKey(wrong) {
  asking ??= open(wrong).finally(() => { asking = null; });
  return asking;
}

function open(wrong) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  const error = document.getElementById("key-error");
  error.hidden = !wrong;
  error.textContent = wrong ? "That key was not accepted." : "";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" && input.value.trim();
      if (given) sessionStorage.setItem(NAME, given);
      input.value = "";
      resolve(Boolean(given));
    }, { once: true });
  });
}
