import { settingOf, type Cache } from "./run";
import type { CacheKind, Model } from "./state";

interface Props {
  model: Model;
  name: Cache["name"];
  choose: (name: Cache["name"]) => void;
}

/** A choice of none, the caches that the model can have, and one that a deadline buys; and the number of the chosen one. */
export function CacheFields({ model, name, choose }: Props) {
  const kinds = kindsOf(model);
  const setting = settingOf(model, name);
  if (!kinds.length) return null;
  return (
    <div class="fields">
      <label class="grow">
        Cache
        <select name="cache" value={name} onChange={(event) => choose(event.currentTarget.value as Cache["name"])}>
          <option value="off">off</option>
          {kinds.map((kind) => (
            <option key={kind} value={kind}>
              {kind}
            </option>
          ))}
          {kinds.includes("patch") && <option value="if_late">patch, if late without</option>}
        </select>
      </label>
      {setting && (
        <label key={name}>
          {setting.name === "threshold" ? "Threshold" : "Interval, steps"}
          <input
            name="cache_value"
            type="number"
            min={setting.least}
            max={setting.most}
            step={setting.name === "threshold" ? "any" : 1}
            defaultValue={setting.default}
          />
        </label>
      )}
    </div>
  );
}

/** The caches of requests for this model; an exact server refuses all. */
export const kindsOf = ({ tilework }: Model): CacheKind[] =>
  tilework.exact ? [] : (Object.keys(tilework.cache_settings) as CacheKind[]);
