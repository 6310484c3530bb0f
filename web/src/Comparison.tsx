import type { Compared } from "./compare";
import { Progress, Shown } from "./Result";
import { hasEnded, type Cache } from "./run";
import type { CacheKind, Timeline } from "./state";
import { partsOf, percent, seconds } from "./words";

const WIDTH = 400;
const HEIGHT = 220;
const EDGE = { left: 50, right: 26, top: 22, bottom: 40 };
const STEP_DB = 10;

interface Props {
  pictures: Compared[];
  total: number;
  cancel: () => void;
}

/** Pictures with a cache beside the one without: what was saved, and what it did to them. */
export function Comparison({ pictures, total, cancel }: Props) {
  const { run } = pictures.at(-1)!;
  const isOpen = !hasEnded(run) || (run.state === "done" && pictures.length < total);
  const made = pictures.filter((one) => one.run.state === "done");
  return (
    <section class="card pad" aria-label="Comparison" aria-busy={isOpen}>
      <p class="prompt">{run.wish.prompt}</p>
      {isOpen && <Progress run={run} cancel={cancel} place={pictures.length - 1} total={total} />}
      {run.trouble && (
        <p class="bad" role="alert">
          {run.trouble}
        </p>
      )}
      {run.state === "cancelled" && <p class="soft">Cancelled.</p>}
      <div class="compared">
        {made.map((one, place) => (
          <Picture key={place} picture={one} />
        ))}
      </div>
      {made.length > 1 && <Curve pictures={made.slice(1)} />}
      {made[0] && <p class="soft">Seed {made[0].run.timeline!.seed} for all. The time is that of the steps, without waiting.</p>}
    </section>
  );
}

function Picture({ picture }: { picture: Compared }) {
  const { run, psnr_db } = picture;
  const { cache } = run.timeline!;
  return (
    <figure>
      <Shown run={run} />
      <figcaption class="num">
        <b>{cacheName(run.wish.cache!)}</b>
        <span>steps {seconds(steps_s(run.timeline!))}</span>
        {cache && <span>{percent(cache.saving)} skipped</span>}
        {cache?.off && <span class="soft">{cache.off}</span>}
        {psnr_db !== null && <span>{psnr_db === Infinity ? "equal pixels" : `PSNR ${psnrText(psnr_db)}`}</span>}
      </figcaption>
    </figure>
  );
}

const cacheName = ({ name, value }: Cache): string => (value === null ? "no cache" : `${name}, ${value}`);

const psnrText = (psnr_db: number): string => (psnr_db === Infinity ? "equal" : `${psnr_db.toFixed(1)} dB`);

/** How long the steps took, without waiting. */
const steps_s = ({ segments }: Timeline): number =>
  segments.reduce((sum, one) => sum + (one.steps ? one.end_s - one.start_s : 0), 0);

/** PSNR over what was skipped. Pictures that are equal to the one without a cache are at the top. */
function Curve({ pictures }: { pictures: Compared[] }) {
  const points = pictures.flatMap(({ run, psnr_db }) =>
    psnr_db === null ? [] : [{ saving: run.timeline!.cache?.saving ?? 0, psnr_db, value: run.wish.cache!.value! }],
  );
  const ratios = points.map((one) => one.psnr_db).filter(Number.isFinite);
  const lowest = Math.floor(Math.min(20, ...ratios) / STEP_DB) * STEP_DB;
  const highest = (Math.floor(Math.max(40, ...ratios) / STEP_DB) + 1) * STEP_DB;
  const x = (saving: number): number => EDGE.left + saving * (WIDTH - EDGE.left - EDGE.right);
  const y = (ratio: number): number =>
    EDGE.top + ((highest - Math.min(highest, ratio)) / (highest - lowest)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const levels = Array.from({ length: (highest - lowest) / STEP_DB + 1 }, (_, place) => lowest + place * STEP_DB);
  /** Those of all that are in this place, at the first of them. */
  const namesOf = (one: (typeof points)[number]) => {
    const alike = points.filter((other) => other.saving === one.saving && other.psnr_db === one.psnr_db);
    if (alike[0] !== one) return null;
    return (
      <text x={x(one.saving) + 7} y={y(one.psnr_db) - 6}>
        {alike.map((other) => other.value).join(", ")}
      </text>
    );
  };
  return (
    <svg class="growth saving" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="PSNR over what was skipped">
      {levels.map((level) => (
        <g key={level}>
          <line x1={EDGE.left} x2={WIDTH - EDGE.right} y1={y(level)} y2={y(level)} />
          <text x={EDGE.left - 6} y={y(level) + 4} text-anchor="end">
            {level === highest ? "equal" : `${level} dB`}
          </text>
        </g>
      ))}
      {[0, 0.25, 0.5, 0.75, 1].map((share) => (
        <text key={share} x={x(share)} y={HEIGHT - 22} text-anchor="middle">
          {percent(share)}
        </text>
      ))}
      <text x={x(0.5)} y={HEIGHT - 6} text-anchor="middle">
        of the {partsOf(pictures[0]!.run.wish.cache!.name as CacheKind)} skipped
      </text>
      <polyline points={points.map((one) => `${x(one.saving)},${y(one.psnr_db)}`).join(" ")} />
      {points.map((one) => (
        <g key={one.value}>
          <circle cx={x(one.saving)} cy={y(one.psnr_db)} r="4" class={one.psnr_db === Infinity ? "open" : ""}>
            <title>{`${one.value}: ${percent(one.saving)} skipped, ${psnrText(one.psnr_db)}`}</title>
          </circle>
          {namesOf(one)}
        </g>
      ))}
    </svg>
  );
}
