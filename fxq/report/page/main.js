/* Start: the bar, the tabs, the first view. The last script. */

function start() {
  document.getElementById("title").textContent = data.title;
  const usable = tabs.filter((tab) => (tab.kinds ?? ["model"]).includes(data.kind ?? "model"));
  const bar = document.getElementById("tabs");
  const views = document.getElementById("views");
  const made = new Set();
  const hosts = {};
  for (const tab of usable) {
    const host = (hosts[tab.id] = el("section.view", { id: `view-${tab.id}`, role: "tabpanel", "aria-label": tab.title, hidden: true }));
    views.append(host);
    const about = { role: "tab", "data-tab": tab.id, "aria-controls": host.id, onclick: () => go({ tab: tab.id }) };
    bar.append(el("button", about, tab.title));
  }
  const open = () => {
    const chosen = usable.find((tab) => tab.id === state.tab) ?? usable[0];
    if (!chosen) return;
    for (const tab of usable) hosts[tab.id].hidden = tab !== chosen;
    for (const button of /** @type {any} */ (bar.children)) button.setAttribute("aria-selected", String(button.dataset.tab === chosen.id));
    if (!made.has(chosen.id)) {
      made.add(chosen.id);
      chosen.render(hosts[chosen.id], data); // it must have a size when it is drawn, so only now
    }
    emit("tab", chosen.id);
  };
  const tools = document.getElementById("tools");
  if (whole.parts) {
    const options = whole.parts.map((part) => el("option", { value: part.name, selected: part === shownPart }, part.name));
    const choose = (event) => {
      location.hash = "#" + new URLSearchParams({ tab: state.tab ?? "", part: event.target.value });
      location.reload();
    };
    tools.append(el("label", `part (of ${options.length}) `, el("select", { id: "part", onchange: choose }, ...options)));
    const lines = whole.python.map((line) => el("li", line));
    const about = el("details", { id: "about-parts" }, el("summary", `${whole.title}: ${whole.summary}`));
    about.append(el("p.note", "Code that stays in Python:"), el("ul", ...lines));
    document.getElementById("views").before(about);
  }
  const help = makeHelp();
  if (passes.length) {
    const search = makeSearch(tools);
    onKeys({ "/": search.focus }, () => true);
  }
  onKeys({ "?": help.toggle, t: turnTheme }, () => true);
  tools.append(signButton("keys (?)", "?", "help-button", help.toggle), signButton("light or dark (t)", "◐", "theme", turnTheme));
  prefersDark.addEventListener("change", applyTheme);
  on("state", (changed) => {
    if (changed.theme) applyTheme();
    if (changed.tab) open();
  });
  Object.assign(hooks, { state, go, data });
  applyTheme();
  open();
  document.body.dataset.ready = "";
}

start();
