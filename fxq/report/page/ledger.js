/* The Ledger tab: every op of the model, in a table that can be sorted and filtered. */

/** A table that sorts by a click on (or Enter at) a header. Values that are missing come last either way.
 * `down`: whether the largest comes first at the first click.
 * @typedef {{key: string, title: string, value: (row: any) => any, cell?: (row: any) => Node|string, help?: string, down?: boolean}} Column
 * @param {Column[]} columns
 * @param {any[]} rows
 * @param {{onclick?: (row: any) => void, label: string}} options
 * @returns {{table: HTMLElement, show: (wanted: (row: any) => boolean) => number}} */
function sortable(columns, rows, options) {
  const body = el("tbody");
  const numbers = new Set(columns.filter((column) => rows.some((row) => typeof column.value(row) === "number")));
  const lines = rows.map((row) => ({ row, line: tableRow(columns, row, numbers, options.onclick) }));
  const headers = columns.map((column, k) =>
    el(numbers.has(column) ? "th.number" : "th", { scope: "col", "data-key": column.key, "aria-sort": "none", title: column.help ?? null },
      el("button", { onclick: () => sortBy(k) }, column.title)),
  );
  let sorted = { k: -1, down: false };
  const sortBy = (k) => {
    const down = sorted.k === k ? !sorted.down : columns[k].down === true;
    sorted = { k, down };
    headers.forEach((header, i) => header.setAttribute("aria-sort", i !== k ? "none" : down ? "descending" : "ascending"));
    const keyed = lines.map((line) => ({ line, value: columns[k].value(line.row) }));
    keyed.sort((a, b) => compareValues(a.value, b.value, down));
    body.append(...keyed.map(({ line }) => line.line));
  };
  body.append(...lines.map(({ line }) => line));
  const show = (wanted) => {
    let count = 0;
    for (const { row, line } of lines) {
      const kept = wanted(row);
      line.hidden = !kept;
      if (kept) count++;
    }
    return count;
  };
  return { table: el("table.sortable", { "aria-label": options.label }, el("thead", el("tr", ...headers)), body), show };
}

function tableRow(columns, row, numbers, onclick) {
  const shown = (column) => (column.cell ? column.cell(row) : String(column.value(row) ?? ""));
  const line = el("tr", ...columns.map((column) => el(numbers.has(column) ? "td.number" : "td", {}, shown(column))));
  if (onclick) {
    line.classList.add("clickable");
    line.tabIndex = 0;
    const chosen = (event) => event.target.closest("button") === null && onclick(row);
    line.addEventListener("click", (event) => !String(getSelection()) && chosen(event));
    line.addEventListener("keydown", (event) => event.key === "Enter" && chosen(event));
  }
  return line;
}

const missing = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);

function compareValues(a, b, down) {
  if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return down ? -order : order;
}

/** A precision in its colour, and in words. @param {string} precision */
const precisionTag = (precision) => el(`span.precision.precision-${precision}`, precision);

const inMicroseconds = (value) => (missing(value) ? "" : value < 100 ? value.toFixed(1) : value.toFixed(0));

const LEDGER_COLUMNS = [
  { key: "order", title: "#", value: (row) => row.order, help: "execution order" },
  { key: "layer", title: "layer", value: (row) => row.path || row.name, help: "module path" },
  { key: "op", title: "op", value: (row) => row.op },
  { key: "precision", title: "runs as", value: (row) => row.precision, cell: (row) => precisionTag(row.precision) },
  { key: "sqnr", title: "SQNR dB", value: (row) => numeric(row.sqnr), cell: (row) => inDecibels(row.sqnr), help: "of its output against the float model" },
  { key: "own_sqnr", title: "own dB", value: (row) => numeric(row.own_sqnr), cell: (row) => inDecibels(row.own_sqnr), help: "the same, had it got the float model's values" },
  { key: "cosine", title: "cosine", value: (row) => numeric(row.cosine), cell: (row) => (missing(row.cosine) ? "" : numeric(row.cosine).toFixed(5)), help: "of the angle between its output and the float model's" },
  { key: "max_error", title: "max error", down: true, value: (row) => numeric(row.max_error), cell: (row) => (missing(row.max_error) ? "" : short(numeric(row.max_error))), help: "largest difference from the float model's value" },
  { key: "macs", title: "MACs", down: true, value: (row) => row.macs || null, cell: (row) => (row.macs ? counted(row.macs) : ""), help: "multiply-accumulates" },
  { key: "saved_bytes", title: "saved B", down: true, value: (row) => row.saved_bytes || null, cell: (row) => (row.saved_bytes ? counted(row.saved_bytes) : ""), help: "what its weight is smaller by than in float32" },
  { key: "float_us", title: "float µs", down: true, value: (row) => row.float_us, cell: (row) => inMicroseconds(row.float_us), help: "measured, of the op or unit in float" },
  { key: "int8_us", title: "int8 µs", down: true, value: (row) => row.int8_us, cell: (row) => inMicroseconds(row.int8_us), help: "measured, of the op or unit on integers, or with an integer weight" },
  { key: "why", title: "why, and what would change it", value: (row) => row.reason, cell: whyCell },
];

function whyCell(row) {
  const kind = row.kind ? el("span.quiet", row.decided_by ? `${row.kind}, by ${row.decided_by}` : row.kind) : null;
  return el("div.why", row.reason ? el("span", row.reason) : null, kind, row.fix ? copyable(row.fix) : null);
}

function renderLedger(host, all) {
  host.classList.add("sheet");
  const rows = all.ledger.rows.map((row, order) => ({ ...row, order: order + 1 }));
  const columns = LEDGER_COLUMNS.filter((c) => ["order", "layer", "op", "precision", "why"].includes(c.key) || rows.some((row) => !missing(c.value(row))));
  const { table, show } = sortable(columns, rows, { onclick: showNode, label: "ledger" });
  const total = counts(rows.map((row) => row.precision));
  const precisions = new Set();
  const search = el("input", { type: "search", placeholder: "filter: layer, op, reason", "aria-label": "filter the ledger", id: "ledger-filter" });
  const shown = el("output", { "aria-live": "polite" });
  const chips = [...total].map(([precision, count]) =>
    el("button.pick", { "aria-pressed": "false", "data-precision": precision, onclick: (event) => toggle(precision, event.currentTarget) }, precisionTag(precision), String(count)),
  );
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const count = show((row) => (!precisions.size || precisions.has(row.precision)) && words.every((word) => textOf(row).includes(word)));
    shown.textContent = count === rows.length ? `${count} ops` : `${count} of ${rows.length} ops`;
  };
  const toggle = (precision, chip) => {
    if (!precisions.delete(precision)) precisions.add(precision);
    chip.setAttribute("aria-pressed", String(precisions.has(precision)));
    filter();
  };
  search.addEventListener("input", filter);
  host.append(
    el("div.controls", search, ...chips, shown, el("span.note", `${percent(all.ledger.coverage)} of the multiply-accumulates in int8; click a row to see it in the graph`)),
    el("div.tablebox", table),
  );
  filter();
}

const textOf = (row) => (row.text ??= [row.name, row.path, row.op, row.reason, row.kind, row.decided_by, row.fix, row.source].join(" ").toLowerCase());

tabs.push({ id: "ledger", title: "Ledger", render: renderLedger });
