"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const get = id => document.getElementById(id);
  const make = (tag, text, cls) => {
    const one = document.createElement(tag);
    if (text !== undefined) one.textContent = text;
    if (cls) one.className = cls;
    return one;
  };
  const told = value => `${value.site || "(the model)"} · ${value.kind}${value.leaf ? " " + value.leaf : ""} · step ${value.step}, ` +
    `call ${value.call}${value.rank ? ", rank " + value.rank : ""} · ${value.verdict} · relative error ${value.shown.rel}, ` +
    `rounding ${value.shown.floor}, max abs ${value.shown.max}` + (value.where ? ` · first at ${value.where}` : "") +
    (value.follows ? ` · follows from ${value.follows}` : "") + (value.how ? ` · ${value.how}` : "");

  data.levels.forEach((text, level) => {
    const item = make("li");
    item.append(make("i", "", "l" + level), text);
    get("legend").append(item);
  });
  data.maps.forEach((map, index) => get("kind").append(new Option(map.kind, index)));
  get("kind").parentElement.hidden = data.maps.length < 2;

  function drawMap(map) {
    const table = get("map");
    table.replaceChildren();
    table.classList.toggle("dense", map.calls.length * map.parts.length > 40);
    const head = table.createTHead(), calls = head.insertRow(), parts = head.insertRow();
    calls.append(make("th", ""));
    parts.append(make("th", "layer"));
    for (const call of map.calls) {
      const cell = make("th", call, "call");
      cell.colSpan = map.parts.length;
      calls.append(cell);
      for (const part of map.parts) {
        const name = make("th", undefined, "part");
        name.append(make("span", part || "itself"));
        parts.append(name);
      }
    }
    const body = table.createTBody();
    map.rows.forEach((name, row) => {
      const line = body.insertRow();
      const header = make("th", name);
      header.scope = "row";
      line.append(header);
      for (const place of map.cells[row]) {
        const cell = line.insertCell();
        if (place < 0) { cell.className = "none"; continue; }
        const value = data.values[place];
        cell.className = `l${value.level}${value.first ? " first" : ""}`;
        cell.tabIndex = 0;
        cell.title = told(value);
        cell.setAttribute("aria-label", told(value));
        cell.onmouseenter = cell.onfocus = () => { get("told").textContent = told(value); };
      }
    });
  }

  const COLUMNS = ["site", "kind", "call", "max abs", "mean abs", "rel L2", "rel diff", "rounding", "verdict"];
  const NUMBERS = new Set([3, 4, 5, 6, 7]);
  const MOST = 400;
  function drawTable() {
    const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const order = get("order").value === "call" ? data.values.map((_, place) => place) : data.worst;
    const fits = order.filter(place => {
      const value = data.values[place], text = `${value.site} ${value.kind} ${value.verdict} ${value.follows}`.toLowerCase();
      return words.every(word => text.includes(word));
    });
    const table = get("values");
    table.replaceChildren();
    const head = table.createTHead().insertRow(), body = table.createTBody();
    COLUMNS.forEach((name, place) => head.append(make("th", name, NUMBERS.has(place) ? "number" : "")));
    for (const place of fits.slice(0, MOST)) {
      const value = data.values[place], line = body.insertRow(), shown = value.shown;
      if (value.first) line.className = "first";
      const cells = [value.site || "(the model)", value.kind + (value.leaf ? " " + value.leaf : ""),
        `${value.step}.${value.call}${value.rank ? " rank " + value.rank : ""}`, shown.max, shown.mean, shown.rel, shown.diff, shown.floor,
        value.verdict + (value.follows ? `, follows from ${value.follows}` : "") + (value.where ? `, first at ${value.where}` : "")];
      cells.forEach((text, column) => {
        const cell = line.insertCell();
        if (column === 0) cell.append(make("i", "", "l" + value.level));
        cell.append(text);
        if (NUMBERS.has(column)) cell.className = "number";
      });
    }
    get("count").textContent = `${Math.min(fits.length, MOST)} of ${data.values.length} values`;
  }

  get("kind").onchange = () => drawMap(data.maps[get("kind").value]);
  get("search").oninput = get("order").onchange = drawTable;
  drawMap(data.maps[0]);
  drawTable();
  document.documentElement.dataset.ready = "";
})();
