"use strict";
(() => {
  // Tables: a click on a heading sorts by its column, by the first number in each cell or by text.
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^[^\w.+-]*[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+)/i);
    return found ? parseFloat(found[0].replace(/^[^\d.+-]*/, "")) : NaN;
  };
  const order = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || a.localeCompare(b, "en");
    return x - y;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      button.title = "sort by this column";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => (up ? 1 : -1) * order(a.cells[column].textContent, b.cells[column].textContent));
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
