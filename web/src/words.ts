/** Numbers and names as texts. */

import type { CacheUse, Card } from "./state";

export function seconds(value: number): string {
  const size = Math.abs(value);
  if (size >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 600) return `${(value / 60).toFixed(0)} min`;
  if (size !== 0 && size < 0.0995) return `${(value * 1e3).toFixed(0)} ms`;
  return `${value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)} s`;
}

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) {
    value /= 1000;
    place++;
  }
  return `${value.toFixed(place && value < 10 ? 1 : 0)} ${units[place]}`;
}

export const percent = (share: number): string =>
  `${(100 * share).toFixed(share > 0.99 && share < 1 ? 1 : 0)}%`;

/** "97% busy, 61 °C, 540 of 700 W, slowed by its power cap"; what a card does not tell is left out. */
export function cardText(card: Card): string {
  const limit = card.limit_watts === null ? "" : ` of ${card.limit_watts.toFixed(0)}`;
  const parts = [
    card.busy === null ? "" : `${percent(card.busy)} busy`,
    card.celsius === null ? "" : `${card.celsius} °C`,
    card.watts === null ? "" : `${card.watts.toFixed(0)}${limit} W`,
    card.slowed_by?.length ? `slowed by ${card.slowed_by.join(" and ")}` : "",
  ];
  return parts.filter(Boolean).join(", ");
}

/** "35% of the patches skipped", and why it was not more. */
export const cacheText = ({ kind, saving, off }: CacheUse): string =>
  `${percent(saving)} of the ${partsOf(kind)} skipped${off === null ? "" : `: ${off}`}`;

/** What a cache skips. */
export const partsOf = (kind: CacheUse["kind"]): string => (kind === "patch" || kind === "image" ? "patches" : "blocks");

/** "devices 0-1, 4" */
export function devicesText(ids: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && last[1] === id - 1) last[1] = id;
    else runs.push([id, id]);
  }
  const text = runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
  return `device${ids.length === 1 ? "" : "s"} ${text || "none"}`;
}
