// What axe-core finds on the page.
addEventListener("load", () => setTimeout(async () => {
  const outside = { exclude: [".chart svg", "figure svg"] };  // pictures with a name
  const found = await axe.run(outside, { resultTypes: ["violations"] });
  const faults = found.violations.map(({ id, nodes }) => [id, nodes.length, nodes[0].html.slice(0, 200)]);
  document.title = JSON.stringify({ faults, passes: found.passes.length });
}, 1500));
