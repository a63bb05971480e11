// Values of all curves of a diagram at the iteration below the pointer.
for (const figure of document.querySelectorAll(".chart")) {
  const curves = JSON.parse(figure.dataset.curves);
  const [first, last] = [Number(figure.dataset.first), Number(figure.dataset.last)];
  const drawing = figure.querySelector(".plot > svg:last-child");
  const readout = figure.querySelector(".readout");
  const pointer = document.createElementNS("http://www.w3.org/2000/svg", "line");
  pointer.setAttribute("class", "pointer");
  for (const [name, value] of [["y1", 0], ["y2", 220]]) pointer.setAttribute(name, value);
  const nearest = (points, wanted) =>
    points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best));
  drawing.addEventListener("pointermove", (event) => {
    const place = drawing.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - place.left) / place.width));
    const wanted = first + share * (last - first);
    for (const name of ["x1", "x2"]) pointer.setAttribute(name, 1000 * share);
    drawing.append(pointer);
    readout.textContent = curves
      .filter((curve) => curve.points.length)
      .map((curve) => {
        const [iteration, value] = nearest(curve.points, wanted);
        return `${curve.name}: ${Number(value.toPrecision(5))} at ${iteration}`;
      })
      .join("; ");
  });
  drawing.addEventListener("pointerleave", () => {
    pointer.remove();
    readout.textContent = "\u00a0";
  });
}
