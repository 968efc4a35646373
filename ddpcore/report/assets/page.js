"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

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

  // Charts: drawn when they come into view. Without them, the static pictures stay.
  const themed = (place, layout) => {
    const style = getComputedStyle(document.documentElement);
    const [text, line] = [style.getPropertyValue("--text").trim(), style.getPropertyValue("--line").trim()];
    const axis = (own) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...own });
    return {
      ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 }, margin: { t: 16, r: 12, b: 44, l: 56 },
      legend: { orientation: "h", x: 0, xref: "paper", y: 1.01, yanchor: "bottom" }, hovermode: layout.hovermode || layout.yaxis.type === "category" ? "closest" : "x unified",
      hoverlabel: { bgcolor: style.getPropertyValue("--back").trim(), font: { color: text } },
    };
  };
  const draw = (place) => {
    const figure = figures[place.id];
    const kind = place.parentElement.className;
    if (/bars|dots/.test(kind)) place.style.height = `${Math.min(1200, 130 + 26 * place.dataset.rows)}px`;
    if (/network/.test(kind)) place.style.height = "300px";
    place.parentElement.classList.add("drawn");
    Plotly.newPlot(place, structuredClone(figure.data), themed(place, figure.layout), { responsive: true, displaylogo: false, displayModeBar: "hover" });
  };
  const unpack = async () => {
    const packed = document.getElementById("plotly").textContent.trim();
    if (!packed || typeof DecompressionStream === "undefined") return;
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const code = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        watch.unobserve(entry.target);
        draw(entry.target.querySelector(".chart"));
      }
    }, { rootMargin: "400px" });
    document.querySelectorAll("figure").forEach((figure) => watch.observe(figure));
    dark.addEventListener("change", () => document.querySelectorAll(".drawn .chart").forEach(draw));
    document.documentElement.dataset.ready = "yes";
  };
  unpack();
})();
