// Light or dark: as the system says, until the button says otherwise.

const NAME = "quire-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

export function onThemeChange(listener) {
  listeners.push(listener);
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function startTheme(button) {
  const chosen = localStorage.getItem(NAME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  const changed = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    listeners.forEach((listener) => listener());
  };
  button.addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = wanted;
    localStorage.setItem(NAME, wanted);
    changed();
  });
  system.addEventListener("change", changed);
  changed();
}
