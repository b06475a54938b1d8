// Two tabs: arrow keys move between them, and the address remembers which one is open.

export function startTabs(onShow) {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const show = (tab, focus) => {
    for (const each of tabs) {
      const chosen = each === tab;
      each.setAttribute("aria-selected", String(chosen));
      each.tabIndex = chosen ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) tab.focus();
    const name = tab.id.slice("tab-".length);
    history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
    onShow(name);
  };
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => show(tab, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const to = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1
        : step && (place + step + tabs.length) % tabs.length;
      if (to !== undefined) {
        event.preventDefault();
        show(tabs[to], true);
      }
    });
  });
  const open = () => show(tabs.find((tab) => `#${tab.id.slice(4)}` === location.hash) ?? tabs[0], false);
  addEventListener("hashchange", () => { if (location.hash !== "#main") open(); });
  open();
}
