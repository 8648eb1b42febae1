/* What every other script of the page uses: the data, the tabs, the state in the URL, small helpers.

   The data is one object in <script id="fxq-data">; `fxq/report/report.py` writes it, of kind "model" or "compare":
     title, fxq, backend, recipe     texts
     looks, changes                  of `fxq/display/colours.py`: how kinds of nodes, and changes, look and what they are called
     nodes                           every `NodeView` of every pass once; what has its default is left out
     passes                          [{name, ms, stage, sqnr?, nodes: [number in nodes], rewrites: [{rule, source, before, after}],
                                       near: [{rule, source, node, matched, of, reason}],
                                       diff: {order, mark, told, became}}], see diff.js; null for the first
     ledger                          {coverage, output_sqnr, rows}, rows as `Entry` of `fxq/ledger/ledger.py`
     values, weights                 histograms and ranges by the name of a row of the ledger
     time, size                      measured, of the float and the int8 model
     (kind "parts": see `whole`; #part selects the one that is shown)
     tuning                          null, or {search, sensitivity}: tables of `fxq/tuning`, see tuning.js
   A number that is not finite stands as text: "inf", "-inf", "nan".

   Stable names for tests and links:
     #tabs button[data-tab=ID]       the tabs; #view-ID is what a tab shows
     #theme, #search, #search-count, #results [data-result=NODE], #help-button, #help
     #timeline [data-pass=NAME]      a pass; aria-current on the one that is shown. NAME.2 for the second of a name
     [data-mode=graph|diff|side]     what is shown; aria-pressed
     .pane[data-side=before|after] canvas.graph      the graphs
     #collapse-all, #expand-all, #depth, #fit, #zoom-in, #zoom-out, #changes (how many nodes changed, in a diff)
     #rewrites [data-rule] [data-rewrite=NUMBER], #near
     #panel[data-node=NAME] dd[data-fact="scale"], [data-goto=NAME], [data-chart=values|weights]; also data-fact reason, fix, note
     body[data-ready]                set when the first view is drawn
     window.fxq                      hooks: data, state, go({...}); from the Graph tab: panes, shown, step(pass), painted()
   State in the hash: tab, theme, pass, mode, node (or "/" and the key of a group), rw (number of a rewrite), depth:
     #tab=graph&pass=fuse&mode=diff&node=conv1 */

/** The data of the page: of a model in parts, `{kind: "parts", title, summary, python, parts: [{name, data}]}`.
 * @type {any} */
const whole = JSON.parse(document.getElementById("fxq-data").textContent);

/** The part that is shown, of a model in parts: the one that the hash names, or the first. */
const shownPart = whole.parts?.find((part) => part.name === new URLSearchParams(location.hash.slice(1)).get("part")) ?? whole.parts?.[0];

/** @type {any} */
const data = shownPart?.data ?? whole;

/** Whether the page is of two models; its "passes" are then the graph as traced, and that of either model. */
const isPair = data.kind === "compare";
document.body.dataset.kind = data.kind;

/** Tabs in the order of the bar: a script pushes `{id, title, kinds, render(host, data)}`; `render` is called once, when
 * the tab is first opened. `kinds`: the kinds of data that it can show, "model" when left out.
 * @type {{id: string, title: string, kinds?: string[], render: (host: HTMLElement, data: any) => void}[]} */
const tabs = [];

/** Hooks for tests and for who plays with the page in the console. */
const hooks = (window.fxq = {});

/** A new element. Children that are strings become text, never markup; a button submits nothing, unless it says so.
 * @param {string} tag  name, with classes: "div.row.wide"
 * @param {...any} parts  attributes, if first: "on…" are listeners, what is null or false is left out; then children
 * @returns {any} */
function el(tag, ...parts) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  if (name === "button") made.type = "button";
  const attributes = parts[0]?.constructor === Object ? parts.shift() : {};
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...parts.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that is a sign, with its meaning. */
const signButton = (title, sign, id, onclick) => el("button", { id, title, "aria-label": title, onclick }, sign);

/** Add to the list that a map has at a key. */
function put(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
}

/** How often each value is there. @returns {Map<any, number>} */
const counts = (values) => d3.rollup(values, (found) => found.length, (value) => value);

// ---- state: in the hash, so that a link or a screenshot can be made again

/** @type {Record<string, string>} */
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** @type {Record<string, ((detail: any) => void)[]>} */
const listeners = {};

/** Call `listener(detail)` whenever `emit(name, detail)` is. Events: "state" (detail: what changed), "theme". */
function on(name, listener) {
  (listeners[name] ??= []).push(listener);
}

function emit(name, detail) {
  for (const listener of listeners[name] ?? []) listener(detail);
}

/** Change the state: `go({pass: "fuse", node: ""})`; an empty value leaves the hash. Everything that shows it follows. */
function go(changes) {
  const changed = {};
  for (const [key, value] of Object.entries(changes)) {
    const text = value === null || value === undefined ? "" : String(value);
    if (text === (state[key] ?? "")) continue;
    changed[key] = true;
    if (text) state[key] = text;
    else delete state[key];
  }
  if (!Object.keys(changed).length) return;
  history.replaceState(null, "", "#" + new URLSearchParams(state));
  emit("state", changed);
}

window.addEventListener("hashchange", () => {
  const next = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  go({ ...Object.fromEntries(Object.keys(state).map((key) => [key, ""])), ...next });
});

// ---- theme

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark: as chosen, else as the system is. */
const isDark = () => (state.theme ? state.theme === "dark" : prefersDark.matches);

const turnTheme = () => go({ theme: isDark() ? "light" : "dark" });

function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  emit("theme", isDark());
}

const prefersStill = matchMedia("(prefers-reduced-motion: reduce)");

/** Milliseconds that a movement may take. @param {number} ms */
const motion = (ms) => (prefersStill.matches ? 0 : ms);

/** A number with three digits: 0.00385, 12.3, 1230. @param {number} value */
const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));

/** Microseconds with a unit that suits them. @param {number} us */
const duration = (us) => (us >= 1e6 ? `${short(us / 1e6)} s` : us >= 1000 ? `${short(us / 1000)} ms` : `${short(us)} µs`);

/** A line of code with a button that copies it. @param {string} text */
function copyable(text) {
  const button = el("button.copy", { title: "copy this line", "aria-label": `copy: ${text}` }, "copy");
  button.addEventListener("click", async () => {
    await copy(text);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return el("span.fix", el("code", text), button);
}

/** To the clipboard; a page opened from disk may not use it in every browser, but it may press "copy". */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
