/* Search by name, op or module path in the pass that is shown: results below the field, Enter goes to them. */

const MOST_RESULTS = 80;

/** @param {HTMLElement} host */
function makeSearch(host) {
  const input = el("input", {
    type: "search",
    id: "search",
    placeholder: "Search name, op, module  /",
    "aria-label": "Search by name, op or module path",
    role: "combobox",
    "aria-expanded": "false",
    "aria-controls": "results",
    autocomplete: "off",
  });
  const count = el("span.count", { id: "search-count", role: "status" });
  const list = el("ol", { id: "results", role: "listbox", "aria-label": "Found nodes", hidden: true });
  host.append(el("div.search", input, count, list));
  /** @type {NodeRecord[]} */
  let found = [];
  let at = -1;

  const find = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (node) =>
      words.every((word) => [node.name, node.label, node.path, ...node.body].some((text) => text.toLowerCase().includes(word)));
    found = words.length ? graphOf(chosenPass()).drawn.filter(fits) : [];
    at = -1;
    count.textContent = words.length ? `${found.length} found` : "";
    list.replaceChildren(...found.slice(0, MOST_RESULTS).map(resultRow));
    if (found.length > MOST_RESULTS) list.append(el("li.more", `and ${found.length - MOST_RESULTS} more: go on typing`));
    list.hidden = !words.length || !found.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
  };
  const resultRow = (node, k) => {
    const onpointerdown = (event) => {
      event.preventDefault();
      jump(k);
      close();
    };
    const about = { id: `result-${k}`, role: "option", "data-result": node.name, onpointerdown };
    return el("li", about, chip(data.looks[node.kind]), el("b", node.label), ` ${node.name}`, el("span.quiet", node.path));
  };
  const jump = (k) => {
    at = (k + found.length) % found.length;
    for (const [row, item] of [...list.children].entries()) item.setAttribute("aria-selected", String(row === at));
    list.children[at]?.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", `result-${at}`);
    count.textContent = `${at + 1} of ${found.length}`;
    go({ tab: "graph", node: found[at].name, rw: "" });
  };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
  };

  input.addEventListener("input", find);
  input.addEventListener("focus", find);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      close();
      input.blur();
    } else if (found.length && (event.key === "ArrowDown" || event.key === "Enter")) jump(at + (event.shiftKey ? -1 : 1));
    else if (found.length && event.key === "ArrowUp") jump(at - 1);
    else return;
    event.preventDefault();
  });
  return {
    focus: () => {
      input.focus();
      input.select();
    },
  };
}
