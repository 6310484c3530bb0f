import { useEffect, useRef, useState } from "preact/hooks";
import { get, Refused } from "./api";
import type { PlanPoint, PlanResult, PlanState } from "./state";
import { percent, seconds } from "./words";

const AGAIN_MS = 1000;
const WIDTH = 560;
const HEIGHT = 258;
const EDGE = { left: 54, right: 20, top: 14, bottom: 42 };
const LABEL = 34; // The room that a number of devices takes below the curve.

/** How many devices the traffic of the latest hour needs. */
export function Plan() {
  const [target, setTarget] = useState("95");
  const [state, setState] = useState<PlanState | null>(null);
  const [trouble, setTrouble] = useState("");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);

  const ask = async (share: number): Promise<void> => {
    clearTimeout(timer.current);
    try {
      const found = await get<PlanState>(`/v1/plan?target=${share}`);
      setTrouble("");
      setState(found);
      if (found.status === "running") timer.current = setTimeout(() => void ask(share), AGAIN_MS);
    } catch (error) {
      setState(null);
      setTrouble(error instanceof Refused ? error.message : "The server does not answer.");
    }
  };
  const submit = (event: Event): void => {
    event.preventDefault();
    void ask(Number((Number(target) / 100).toFixed(6)));
  };
  return (
    <section class="card pad" aria-label="Plan">
      <form class="plan-form" onSubmit={submit}>
        <label>
          On time, %
          <input type="number" min="1" max="99.9" step="any" required value={target} onInput={(event) => setTarget(event.currentTarget.value)} />
        </label>
        <button class="primary" disabled={state?.status === "running"}>
          How many devices?
        </button>
        <span class="soft">By simulation of the requests of the latest hour, beside the server.</span>
      </form>
      {trouble && (
        <p class="bad" role="alert">
          {trouble}
        </p>
      )}
      {state && <Answer state={state} />}
    </section>
  );
}

function Answer({ state }: { state: PlanState }) {
  const asked = `${state.num_requests} requests of ${seconds(state.span_s)}, ${state.num_due} with a deadline`;
  if (state.status === "running") {
    return (
      <p role="status">
        Simulating … {state.simulations} done <span class="soft">({asked})</span>
      </p>
    );
  }
  if (!state.result) {
    return (
      <p class="bad" role="alert">
        No plan: {state.error}
      </p>
    );
  }
  const { result } = state;
  const { points, simulated, live } = result.error;
  const away = Math.abs(points).toFixed(1);
  const mean = result.devices_in_the_mean;
  const now = state.devices_now === 1 ? "there is 1 now" : `there are ${state.devices_now} now`;
  return (
    <>
      <p class="plan-answer" role="status">
        {result.devices === null ? (
          "No number of devices is enough"
        ) : (
          <>
            <strong>{result.devices}</strong> device{result.devices === 1 ? "" : "s"} for {percent(state.target)} on time
          </>
        )}
        <span class="soft">; {now}</span>
        {mean !== null && mean !== result.devices && <span class="soft">; {mean} reach it in the mean only</span>}
      </p>
      {result.points.length > 0 && (
        <div class="columns plan-columns">
          <figure>
            <Curve result={result} state={state} />
            <figcaption class="soft">
              Share on time over the number of devices: simulations with their 95% intervals; dashed is the target.
              {result.points.some((one) => !one.is_whole) && " A hollow point was ended early, and is that share at most."}
            </figcaption>
          </figure>
          <div>
            <Points result={result} />
            <Uses result={result} />
          </div>
        </div>
      )}
      <p class="soft">
        Simulation against this server: on {state.devices_now} device{state.devices_now === 1 ? "" : "s"} it keeps {percent(simulated)} on time,{" "}
        {away === "0.0" ? "as many as were." : `where ${percent(live)} were: ${away} points ${points > 0 ? "too many" : "too few"}.`}
      </p>
      <p class="soft">
        From {asked}; {state.simulations} simulations in {seconds(result.wall_s)}.
      </p>
    </>
  );
}

function Points({ result }: { result: PlanResult }) {
  return (
    <>
      <table>
        <thead>
          <tr>
            <th>devices</th>
            <th>on time</th>
            <th>95% interval</th>
            <th>target</th>
          </tr>
        </thead>
        <tbody>
          {result.points.map((one) => (
            <tr key={one.devices} class={one.devices === result.devices ? "chosen" : ""}>
              <td>{one.devices}</td>
              <td>
                {one.is_whole ? "" : "≤ "}
                {percent(one.share)}
              </td>
              <td>
                {percent(one.low)} to {percent(one.high)}
              </td>
              <td>{one.verdict}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="soft">Meets: the whole interval is at the target or above. Misses: below it. Unsure: neither.</p>
    </>
  );
}

/** What the devices of the answer do. */
function Uses({ result }: { result: PlanResult }) {
  const uses = result.uses.filter((one) => one.devices >= 0.005);
  if (!uses.length) return null;
  return (
    <table aria-label="What the devices do">
      <thead>
        <tr>
          <th>stage</th>
          <th>devices busy</th>
          <th>device time by degree</th>
        </tr>
      </thead>
      <tbody>
        {uses.map((one) => (
          <tr key={`${one.pipeline} ${one.stage}`}>
            <td>
              {one.pipeline} {one.stage}
            </td>
            <td>{one.devices.toFixed(1)}</td>
            <td class="degrees">
              {Object.entries(one.degrees)
                .map(([degree, share]) => `${degree}: ${percent(share)}`)
                .join(", ")}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The share on time over the number of devices, with its intervals. */
function Curve({ result, state }: { result: PlanResult; state: PlanState }) {
  const { points } = result;
  const first = points[0]!.devices;
  const last = points.at(-1)!.devices;
  const lowest = Math.max(0, Math.min(state.target, ...points.map((one) => one.low)) - 0.02);
  const x = (devices: number): number =>
    EDGE.left + ((devices - first) / Math.max(1, last - first)) * (WIDTH - EDGE.left - EDGE.right);
  const y = (share: number): number => EDGE.top + ((1 - share) / (1 - lowest)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const line = points.map((one) => `${x(one.devices)},${y(one.share)}`).join(" ");
  const labelled = new Set<PlanPoint>();
  for (const one of [...points].sort((a, b) => Number(b.devices === result.devices) - Number(a.devices === result.devices)))
    if ([...labelled].every((other) => Math.abs(x(other.devices) - x(one.devices)) >= LABEL)) labelled.add(one);
  const shares = [state.target, ...[lowest, 1].filter((share) => Math.abs(y(share) - y(state.target)) >= LABEL / 2)];
  const title = (one: PlanPoint): string => `${one.devices} devices: ${percent(one.share)}`;
  return (
    <svg class="growth" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Share on time over the number of devices">
      {shares.map((share) => (
        <g key={share}>
          <line class={share === state.target ? "target" : "grid"} x1={EDGE.left} x2={WIDTH - EDGE.right} y1={y(share)} y2={y(share)} />
          <text x={EDGE.left - 6} y={y(share) + 4} text-anchor="end">
            {percent(share)}
          </text>
        </g>
      ))}
      <polyline points={line} />
      {points.map((one) => (
        <g key={one.devices} class={one.devices === result.devices ? "chosen" : ""}>
          <line class="interval" x1={x(one.devices)} x2={x(one.devices)} y1={y(one.low)} y2={y(one.high)} />
          <circle cx={x(one.devices)} cy={y(one.share)} r="4" class={one.is_whole ? "" : "open"}>
            <title>{title(one)}</title>
          </circle>
          {labelled.has(one) && (
            <text x={x(one.devices)} y={HEIGHT - 10} text-anchor="middle">
              {one.devices}
            </text>
          )}
        </g>
      ))}
    </svg>
  );
}
