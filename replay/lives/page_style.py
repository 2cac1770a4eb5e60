"""How a page looks. Colours are given twice, for light and for dark, and never tell anything by themselves."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfaf8; --card: #ffffff; --ink: #1d1f23; --soft: #5a6069; --line: #d9d6d0;
  --accent: #1f5fbf; --bar: #4a7fd0; --track: #ecebe7; --good: #17693a; --bad: #a12622; --waiting: #7a5200;
  --trained: #dff1e3; --old: #f8dfdc; --plain: #eceef2; --environment: #f0e6f7; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171b; --card: #1d2026; --ink: #e8e8e6; --soft: #a5acb6;
  --line: #373c45; --accent: #8ab6ff; --bar: #5c8fdc; --track: #2a2e36; --good: #7fd49d; --bad: #ff9d96;
  --waiting: #efc063; --trained: #1f3a28; --old: #4a2624; --plain: #2b3038; --environment: #382a45; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 74rem; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0 0 .75rem; font: 600 1.9rem/1.2 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
h2 { margin: 0 0 .7rem; font-size: 1.02rem; }
a { color: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -999px; }
.skip:focus { left: 1rem; top: .5rem; background: var(--card); padding: .4rem .7rem; }
.kind { margin: 0; color: var(--soft); }
.verdict { border: 1px solid var(--line); border-left: 6px solid; border-radius: 6px; background: var(--card);
  padding: .8rem 1rem; }
.verdict p { margin: 0 0 .4rem; max-width: 80ch; overflow-wrap: anywhere; }
.verdict p:last-child { margin: 0; }
.verdict.good { border-left-color: var(--good); } .verdict.good strong { color: var(--good); }
.verdict.bad { border-left-color: var(--bad); } .verdict.bad strong { color: var(--bad); }
.verdict.waiting { border-left-color: var(--waiting); } .verdict.waiting strong { color: var(--waiting); }
.notes { margin: .8rem 0 0; padding-left: 1.2rem; color: var(--soft); }
nav ul, .legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: 1rem 0; padding: 0; }
section { border: 1px solid var(--line); border-radius: 6px; background: var(--card); padding: .9rem 1rem;
  margin: 0 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { max-width: 34rem; overflow-wrap: anywhere; white-space: pre-wrap; min-width: 3rem; }
td.n, th.n { text-align: right; }
td.short { white-space: nowrap; }
dl.many { display: block; columns: 20rem auto; column-gap: 2rem; }
.many div { display: flex; justify-content: space-between; gap: 1rem; break-inside: avoid; }
svg { display: block; } .track { fill: var(--track); } .bar { fill: var(--bar); }
.label { fill: var(--ink); font: 13px system-ui, sans-serif; }
.prompt, .response { margin: .4rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 14px/2 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.who { color: var(--soft); }
.tok { padding: .12rem .2rem; margin-right: .25rem; border-bottom: 3px solid var(--hue, transparent);
  background: var(--plain); border-radius: 3px 3px 0 0;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.trained { background: var(--trained); }
.too_old { background: var(--old); text-decoration: line-through; }
.masked { background: none; color: var(--soft); }
.environment { background: var(--environment); font-style: italic; }
.environment::before { content: "["; } .environment::after { content: "]"; }
.v0 { --hue: #3b78d8; } .v1 { --hue: #d98218; } .v2 { --hue: #2f9e74; } .v3 { --hue: #b4459c; } .v4 { --hue: #8a8f1e; }
.v5 { --hue: #d2504a; }
.legend { margin: 0 0 .4rem; }
details summary { cursor: pointer; color: var(--accent); margin: .4rem 0; }
.timeline { margin: 0; padding-left: 1.4rem; }
.timeline li { margin: .15rem 0; overflow-wrap: anywhere; }
.timeline time, .since, code { color: var(--soft); font: .86rem ui-monospace, Menlo, Consolas, monospace; }
.since { display: inline-block; min-width: 5.5rem; text-align: right; }
.void { opacity: .75; text-decoration: line-through; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  .timeline time { display: none; } }
@media print { nav, .skip { display: none; } section { break-inside: avoid; } }
"""
