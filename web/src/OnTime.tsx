import { useFrames } from "./hooks";
import type { Live } from "./live";
import type { Attained } from "./state";
import { percent, seconds } from "./words";

const TITLES: [Attained["by"], string][] = [
  ["class", "By class"],
  ["tenant", "By tenant"],
  ["model", "By model"],
];

/** The share of deadlines that were kept. */
export function OnTime({ live }: { live: Live }) {
  useFrames(live);
  const { state } = live;
  if (!state) return null;
  return (
    <div class="columns">
      {TITLES.map(([by, title]) => (
        <section class="card table" key={by} aria-label={title}>
          <div class="bar">
            <h2>{title}</h2>
          </div>
          <table>
            <thead>
              <tr>
                <th>{by}</th>
                <th>last {seconds(state.attainment_window_s)}</th>
                <th>since the start</th>
                <th>late</th>
                <th>refused</th>
              </tr>
            </thead>
            <tbody>
              {state.attainment
                .filter((one) => one.by === by)
                .map((one) => (
                  <tr key={one.name}>
                    <td>{one.name}</td>
                    <td>
                      <Share met={one.recent_on_time} missed={one.recent_late} />
                    </td>
                    <td>
                      <Share met={one.on_time} missed={one.late} />
                    </td>
                    <td>{one.late}</td>
                    <td>{one.refused}</td>
                  </tr>
                ))}
            </tbody>
          </table>
        </section>
      ))}
      {!state.attainment.length && <p class="soft">No request has ended yet.</p>}
    </div>
  );
}

function Share({ met, missed }: { met: number; missed: number }) {
  const total = met + missed;
  if (!total) return <span class="soft">no deadline</span>;
  return (
    <span class="share" title={`${met} of ${total} on time`}>
      <span class="meter">
        <i style={{ width: `${(100 * met) / total}%` }} />
      </span>
      {percent(met / total)} <span class="soft">of {total}</span>
    </span>
  );
}
