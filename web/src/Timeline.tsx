import { useEffect, useReducer, useRef, useState } from "preact/hooks";
import { useFrames } from "./hooks";
import type { Live } from "./live";
import { Plot, tileText, type Hit } from "./plot";
import { devicesText, seconds } from "./words";

interface Props {
  live: Live;
  chosen: number | null;
  choose: (number: number | null) => void;
}

/** Devices over time, with what moves it. */
export function Timeline({ live, chosen, choose }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<Plot | null>(null);
  const [hit, setHit] = useState<Hit | null>(null);
  const [, changed] = useReducer((count: number) => count + 1, 0);

  useEffect(() => {
    const made = (plot.current = new Plot(place.current!, live));
    made.onChange = () => changed(undefined as never);
    const stop = made.run();
    const wheel = (event: WheelEvent): void => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        made.move((event.deltaX || event.deltaY) / 800);
      } else made.zoom(Math.exp(event.deltaY / 500), offset(event)[0]);
    };
    place.current!.addEventListener("wheel", wheel, { passive: false });
    changed(undefined as never);
    return () => {
      stop();
      place.current?.removeEventListener("wheel", wheel);
    };
  }, [live]);
  useEffect(() => plot.current?.choose(chosen), [chosen]);

  /** Where a pointer is, from the plot's corner. */
  const offset = (event: MouseEvent): [number, number] => {
    const box = place.current!.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const drag = useRef<{ x: number; moved: boolean } | null>(null);
  const down = (event: PointerEvent): void => {
    drag.current = { x: event.clientX, moved: false };
    place.current!.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    const made = plot.current!;
    if (drag.current) {
      const by = event.clientX - drag.current.x;
      if (!drag.current.moved && Math.abs(by) < 4) return;
      drag.current = { x: event.clientX, moved: true };
      made.move(-by / Math.max(1, place.current!.clientWidth - made.gutter));
      return;
    }
    const found = made.at(...offset(event));
    made.hover(found?.tile ?? null);
    setHit(found);
  };
  const up = (event: PointerEvent): void => {
    if (drag.current && !drag.current.moved) {
      const found = plot.current!.at(...offset(event));
      choose(found?.tile.requests.find((number) => live.requests.has(number)) ?? null);
    }
    drag.current = null;
  };
  const leave = (): void => {
    plot.current!.hover(null);
    setHit(null);
  };
  const keys = (event: KeyboardEvent): void => {
    const made = plot.current!;
    const actions: Record<string, () => void> = {
      " ": () => made.pause(),
      ArrowLeft: () => made.move(-0.1),
      ArrowRight: () => made.move(0.1),
      PageUp: () => made.move(-0.9),
      PageDown: () => made.move(0.9),
      End: () => made.follow(),
      "+": () => made.zoom(1 / 1.5),
      "=": () => made.zoom(1 / 1.5),
      "-": () => made.zoom(1.5),
      "[": () => choose(neighbour(live, chosen, -1)),
      "]": () => choose(neighbour(live, chosen, 1)),
      Escape: () => choose(null),
    };
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };

  const made = plot.current;
  return (
    <section class="card" aria-label="Devices over time">
      <div class="bar">
        <h2>Devices over time</h2>
        <Legend live={live} />
        <span class="tools">
          <button class="tool" aria-label="Back" title="Back (←)" onClick={() => made?.move(-0.4)}>
            ‹
          </button>
          <button class="tool" aria-label="Zoom out" title="Zoom out (−)" onClick={() => made?.zoom(1.6)}>
            −
          </button>
          <button class="tool" aria-label="Zoom in" title="Zoom in (+)" onClick={() => made?.zoom(1 / 1.6)}>
            +
          </button>
          <button
            class={`tool wide ${made?.isLive === false ? "on" : ""}`}
            aria-pressed={made?.isLive === false}
            title="Pause or follow (space)"
            onClick={() => made?.pause()}
          >
            {made?.isLive === false ? "Follow" : "Pause"}
          </button>
        </span>
      </div>
      <div
        ref={place}
        class="plot"
        tabIndex={0}
        role="application"
        aria-label="Runs by device and time; the queue below has the same requests"
        aria-describedby="timeline-keys"
        onPointerDown={down}
        onPointerMove={move}
        onPointerUp={up}
        onPointerCancel={() => (drag.current = null)}
        onPointerLeave={leave}
        onKeyDown={keys}
      />
      <p class="hint" id="timeline-keys">
        <kbd>space</kbd> pause, <kbd>←</kbd> <kbd>→</kbd> move, <kbd>+</kbd> <kbd>−</kbd> zoom, <kbd>End</kbd> now,{" "}
        <kbd>[</kbd> <kbd>]</kbd> request, <kbd>Esc</kbd> none. A click follows a request. Triangles are deadlines; what is pale is
        planned.
      </p>
      {hit && <Tip live={live} hit={hit} />}
    </section>
  );
}

function Legend({ live }: { live: Live }) {
  useFrames(live);
  return (
    <span class="legend">
      {live.palette.legend().map(([size, hue]) => (
        <span key={size}>
          <i class="swatch" style={{ background: hue }} />
          {size}
        </span>
      ))}
      {live.state && live.state.num_own < live.state.num_open && (
        <span>
          <i class="swatch others" />
          other tenants
        </span>
      )}
    </span>
  );
}

function Tip({ live, hit }: { live: Live; hit: Hit }) {
  const { tile } = hit;
  const requests = tile.requests.map((number) => live.requests.get(number));
  const isLeft = hit.x > 420;
  return (
    <div class="tip card" style={{ left: isLeft ? "auto" : `${hit.x + 14}px`, right: isLeft ? "14px" : "auto" }}>
      <b>
        {tile.requests.length === 0 ? `weights, from ${tile.ending}` : tileText(tile, requests)} on {devicesText(tile.devices)}
      </b>
      <span>
        {seconds(tile.end_s - tile.start_s)}
        {tile.ending === "" ? ", as predicted" : tile.ending === "done" || !tile.requests.length ? "" : `, ${tile.ending}`}
      </span>
      {requests.map((request, place) => (
        <span key={tile.requests[place]}>
          {request
            ? `${request.number}: ${request.model}, ${request.size}${request.deadline_s === null ? "" : `, due ${seconds(request.deadline_s - request.arrival_s)} after arrival`}`
            : `${tile.requests[place]}: of another tenant`}
        </span>
      ))}
    </div>
  );
}

function neighbour(live: Live, chosen: number | null, by: 1 | -1): number | null {
  const numbers = [...live.requests.keys()].sort((a, b) => a - b);
  if (chosen === null) return numbers.at(by === 1 ? 0 : -1) ?? null;
  return numbers[Math.min(numbers.length - 1, Math.max(0, numbers.indexOf(chosen) + by))] ?? null;
}
