"""How a page looks and what its script does; nothing is fetched from anywhere."""

CSS = """
:root { color-scheme: light dark;
  --back: #ffffff; --card: #f7f8fa; --text: #1c2128; --soft: #5d6673; --line: #dfe3e8; --idle: #e9ecf0; --on: #ffffff;
  --c0: #8a94a3; --c1: #2563c9; --c2: #c2590c; --c3: #7c4fc4; --c4: #1d8a5a; --c5: #b03a78;
  --c6: #8a7400; --c7: #3f7f8c;
  --bad: #cc2936; --good: #1d8a5a; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171c; --card: #1b1f26; --text: #e4e8ee; --soft: #98a2b0; --line: #2d333d; --idle: #262b33; --on: #10131a;
  --c0: #8a94a3; --c1: #6ea3ff; --c2: #f29a55; --c3: #b795f2; --c4: #58c797; --c5: #ee86b7;
  --c6: #d6bf4a; --c7: #74bccb;
  --bad: #ff6b70; --good: #58c797; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 60px; background: var(--back); color: var(--text);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 12px 0 0; display: inline-block; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 8px; }
header > p { margin: 4px 0 16px; color: var(--soft); overflow-wrap: anywhere; }
.outcome { display: inline-block; padding: 2px 12px; border-radius: 12px; font-weight: 600; color: var(--on);
  background: var(--soft); vertical-align: 4px; }
.outcome.finished { background: var(--good); } .outcome.failed { background: var(--bad); }
.outcome.stopped { background: var(--c2); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 0 0 18px; }
.tile { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; min-width: 0; }
.tile dt { color: var(--soft); font-size: 12px; } .tile dd { margin: 0; font-size: 19px; font-weight: 600; }
.tile small { font-weight: 400; color: var(--soft); font-size: 12px; display: block; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0 0 18px; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px 8px;
  min-width: 0; }
figure.wide { margin-top: 14px; }
figcaption { display: flex; gap: 8px; align-items: baseline; flex-wrap: wrap; }
.unit { color: var(--soft); font-size: 12px; }
.choice { margin-left: auto; font-size: 12px; color: var(--soft); }
.choice label { margin-left: 10px; cursor: pointer; }
.choice input { margin: 0 4px 0 0; vertical-align: -1px; accent-color: var(--c1); }
figure:has(input[value=linear]:checked) svg.log, figure:has(input[value=log]:checked) svg.linear { display: none; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; } svg.broad { min-width: 760px; }
svg text { font-size: 11.5px; fill: var(--soft); } svg text.unit { font-size: 11px; }
svg text.on { fill: var(--on); font-size: 11px; pointer-events: none; }
.grid, .axis { stroke: var(--line); stroke-width: 1; fill: none; } .axis { stroke: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.line.dense { stroke-width: 1; }
.dot { fill: var(--c); } .fill, .op { fill: var(--c); }
.mark { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 3; opacity: .8; fill: none; }
.cross { stroke: var(--bad); stroke-width: 2.4; fill: none; }
.cursor { stroke: var(--soft); stroke-width: 1; visibility: hidden; }
rect.idle { fill: var(--idle); } rect.generation { fill: var(--idle); stroke: var(--card); }
rect.g1 { fill: var(--line); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); } .bad { --c: var(--bad); }
.good { --c: var(--good); } .saved { --c: var(--c3); } .end { --c: var(--text); } span.idle { --c: var(--idle); }
.legend { margin: 2px 0 0; font-size: 12px; color: var(--soft); min-height: 18px; }
.key { margin-right: 14px; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px;
  background: var(--c); }
output { display: block; min-height: 18px; text-align: right; color: var(--text); font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; }
.told td:last-child { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 320px; }
details { margin-top: 16px; } summary { cursor: pointer; font-weight: 600; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto;
  font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
"""

# Shows the values under the pointer: below a chart, the nearest point of every curve.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-from]")) {
  const curves = JSON.parse(figure.querySelector("script").textContent);
  const out = figure.querySelector("output"), from = +figure.dataset.from, to = +figure.dataset.to;
  const left = +figure.dataset.left, width = +figure.dataset.width;
  for (const svg of figure.querySelectorAll("svg")) {
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = Math.min(1, Math.max(0, ((event.clientX - box.left) * scale - left) / width));
      const step = from + share * (to - from);
      let nearest = from;
      const told = curves.filter(([, points]) => points.length).map(([name, points], i) => {
        const point = points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
        if (i === 0) nearest = point[0];
        return (i && point[0] !== nearest ? `${name} at ${point[0]}: ` : `${name} `) + (point[1] ?? "not finite");
      });
      out.textContent = [`step ${nearest}`, ...told].join(" · ");
      const x = to > from ? left + (nearest - from) / (to - from) * width : left;
      cursor.setAttribute("transform", `translate(${x} 0)`);
      cursor.style.visibility = "visible";
    });
    svg.addEventListener("pointerleave", () => { out.textContent = ""; cursor.style.visibility = "hidden"; });
  }
}
"""
