"""Every word of the report that is not data, in English and Japanese: the one place for both.

Names of methods, models, tasks, runtimes and commands are data, and the same in both.
"""

from typing import Literal, NamedTuple

Language = Literal["en", "ja"]
LANGUAGES: tuple[Language, ...] = ("en", "ja")


class Word(NamedTuple):
    """A word or sentence in each language; ``{name}`` in it is filled in by ``fill``."""

    en: str
    ja: str

    def fill(self, **values: object) -> "Word":
        """With its placeholders replaced."""
        return Word(*(text.format(**values) for text in self))


Label = Word | str


def said(label: Label, language: Language) -> str:
    """A label's text in a language; data is the same in each."""
    return label if isinstance(label, str) else getattr(label, language)


TITLE = Word("choicespec: what was measured", "choicespec 計測レポート")
QUESTION = Word(
    "Which way of decoding is fastest for this model on this workload, with exactly the same output?",
    "このモデルとこのワークロードで、出力を変えずに最も速いデコード手法はどれか。",
)
SUMMARY = Word("Fastest, with every output kept", "出力を保った最速の手法")
SUMMARY_NOTE = Word(
    "Of the methods whose outputs all equal plain decoding's; 95% interval in brackets.",
    "全出力が通常デコードと一致した手法のうち最速のもの。[ ] は95%信頼区間。",
)
NOTHING_KEPT = Word("No method kept every output.", "全出力が一致した手法はありません。")
NOTHING_MEASURED = Word("Nothing has been measured yet.", "まだ何も計測されていません。")
PUBLISHED_COUNT = Word("{measured} of {all} published rows measured", "公表 {all} 行中 {measured} 行を計測済み")

OWN_TABLE = Word("Measured here", "計測結果")
OWN_NOTE = Word(
    "In the form of the published table, for what it has no row of. Below each figure: its 95% interval; n is the "
    "number of prompts.",
    "公表値の表と同じ形式で、公表値に対応する行がないもの。各値の下は95%信頼区間、n はプロンプト数。",
)
PUBLISHED_TABLE = Word("Beside the published figures", "公表値との比較")
PUBLISHED_NOTE = Word(
    "Every published row. Below a measured figure: its 95% interval, and measured less published. "
    "A rate depends on the machine; compare speed-up, accepted/step and match.",
    "公表値の全行。計測値の下は95%信頼区間と、計測値と公表値の差。速度は計測環境に依存するため、高速化率、採択長、一"
    "致率で比較してください。",
)
NOT_MEASURED = Word("not measured", "未計測")
MEASURE_THEM = Word("Rows not measured here are made with", "未計測の行を計測するコマンド")
NEVER_PROPOSED = Word("never proposed: plain decoding", "ドラフトなし: 通常デコードと同じ")
OMITTED = Word("{count} prompts left out", "{count} 件のプロンプトを除外")
MODEL = Word("model", "モデル")
QUANTIZATION = Word("quantisation", "量子化")
RUNTIME = Word("runtime", "ランタイム")
CONTEXT = Word("context", "コンテキスト長")
TASK = Word("task", "タスク")
BLOCK_LENGTH = Word("L", "L")
METHOD = Word("method", "手法")
SPEEDUP = Word("speed-up", "高速化率")
DECODE_RATE = Word("decode tok/s", "デコード速度 (tok/s)")
ACCEPTED = Word("accepted/step", "採択長/ステップ")
MATCH = Word("match %", "一致率 (%)")
PROMPTS = Word("n", "n")
INTERVAL = Word("95% interval", "95%信頼区間")
PUBLISHED = Word("published", "公表値")
MEASURED = Word("measured", "計測値")
DIFFERENCE = Word("difference", "差")
EXPERIMENT = Word("experiment", "実験")
COMPARED = Word("pair · runtime · task", "ペア · ランタイム · タスク")
REQUEST = Word("request", "リクエスト")
DIFFERS_AT = Word("first differs at", "最初の不一致位置")

SCORER_TABLE = Word("The scorer", "スコアラー")
SCORER_NOTE = Word(
    "Candidates ranked by the prior → by the scorer (by the oracle), on held-out prompts, over all positions. 'Gap' is "
    "the share of the way from prior to oracle. A measured row stands beside the published row that asks the same of "
    "another target.",
    "評価用プロンプトの全位置における、事前ランキング → スコアラー (オラクル) の成績。「差の解消率」は事前ランキング"
    "からオラクルまでの差のうち縮めた割合。計測の行は、別のターゲットで同じ条件を調べた公表の行に並べてある。",
)
TOP1 = Word("top-1 %", "Top-1 正解率 (%)")
ACCEPTED_ALL = Word("accepted, all positions", "採択長 (全位置)")
ACCEPTED_PATH = Word("accepted, decode path", "採択長 (デコード経路)")
GAP = Word("gap %", "差の解消率 (%)")
PUBLISHED_TOP1 = Word("published top-1 %", "公表 Top-1 正解率 (%)")
PUBLISHED_ACCEPTED = Word("published accepted", "公表 採択長")
PUBLISHED_ROW = Word("published row", "公表の行")
MEASURED_ROW = Word("measured row", "計測の行")

PLOTS = Word("Plots", "グラフ")
NUMBERS = Word("The numbers", "数値")
NO_DATA = Word("No data yet. This makes it:", "データがありません。次のコマンドで作成できます:")
MORE = Word("{count} more", "他 {count} 件")

SPEEDUP_PLOT = Word("Speed-up by method", "手法別の高速化率")
SPEEDUP_PLOT_NOTE = Word(
    "Times plain decoding's rate, with 95% intervals; 1 is plain decoding. Diamonds are the published figures.",
    "通常デコードに対する倍率と95%信頼区間。1 が通常デコード。ひし形は公表値。",
)
POSITION_PLOT = Word("Accepted by position", "位置別の採択率")
POSITION_PLOT_NOTE = Word(
    "Of the steps that proposed a first, second, ... token, the share that kept it.",
    "n 番目のトークンを提案したステップのうち、それが採択された割合。",
)
POSITION = Word("position in the draft", "ドラフト内の位置")
SHARE_KEPT = Word("share kept", "採択された割合")
SOURCE_PLOT = Word("Accepted length by source", "提案元別の採択長の分布")
SOURCE_PLOT_NOTE = Word(
    "Steps by how many draft tokens they kept, and by who proposed; grey steps had no draft.",
    "採択トークン数ごとのステップの割合と提案元。灰色はドラフトのないステップ。",
)
TOKENS_KEPT = Word("draft tokens kept", "採択トークン数")
SHARE_OF_STEPS = Word("share of steps", "ステップの割合")
SOURCE = Word("source", "提案元")
STEPS = Word("steps", "ステップ数")
NO_DRAFT = Word("no draft", "ドラフトなし")
TIME_PLOT = Word("Where a step's time goes", "1ステップの時間の内訳")
TIME_PLOT_NOTE = Word(
    "Mean milliseconds of a step. A runtime that does not tell them apart has scoring inside proposing, and the "
    "rest inside verifying.",
    "1ステップの平均時間 (ミリ秒)。区別できないランタイムでは、スコアは提案に、その他は検証に含まれる。",
)
PROPOSE = Word("propose", "提案")
SCORE = Word("score", "スコア")
VERIFY = Word("verify", "検証")
REST = Word("rest", "その他")
MS_A_STEP = Word("ms a step", "ms/ステップ")
CONTEXT_PLOT = Word("Speed-up against context", "コンテキスト長と高速化率")
CONTEXT_PLOT_NOTE = Word(
    "The same pair, runtime and task at several context lengths. Hollow and dashed: published; filled, with "
    "interval: measured.",
    "同じペア、ランタイム、タスクをコンテキスト長を変えて比較。白抜き破線は公表値、塗りつぶしは計測値と信頼区間。",
)
CONTEXT_TOKENS = Word("context, tokens", "コンテキスト長 (トークン)")
TIMES = Word("times plain decoding", "通常デコード比 (倍)")
COST_PLOT = Word("What a verification costs", "検証のコスト")
COST_PLOT_NOTE = Word(
    "Accepted tokens a step from which verifying so many tokens at once beats plain decoding, with the spread of the "
    "rounds. "
    "On the dashed line every draft token would have to be accepted: beyond it nothing pays.",
    "一度に検証するトークン数ごとの、通常デコードより速くなる採択長 (損益分岐) と計測のばらつき。破線は全トークン採"
    "択の上限で、それを超えると得にならない。",
)
TOKENS_VERIFIED = Word("tokens verified at once", "一度に検証するトークン数")
BREAK_EVEN = Word("accepted/step to break even", "損益分岐の採択長/ステップ")
ALL_ACCEPTED = Word("all accepted", "全トークン採択")
CONTEXT_OF = Word("context {tokens}", "コンテキスト {tokens}")
VERIFICATION_MS = Word("ms of a verification", "検証時間 (ms)")
MARGIN_PLOT = Word("Match, and margins where outputs part", "一致率と最初の不一致のマージン")
MARGIN_PLOT_NOTE = Word(
    "A dot is an output that is not plain decoding's: the target's top-2 margin where the two part. A tiny margin "
    "is a numeric tie, a large one a bug.",
    "点は通常デコードと一致しなかった出力。最初の不一致位置におけるターゲットの上位2ロジットの差。小さければ数値誤差"
    "、大きければ不具合。",
)
MARGIN = Word("top-2 margin (logits)", "上位2候補のロジット差")
ALL_MATCH = Word(
    "All {outputs} outputs of the {trials} methods measured are plain decoding's, token for token.",
    "計測した {trials} 手法の全 {outputs} 出力が、通常デコードとトークン単位で一致。",
)
SWEEP_PLOT = Word("A search's Pareto front", "探索のパレートフロント")
SWEEP_PLOT_NOTE = Word(
    "Settings replayed on recorded outputs: the predicted rate against the work for it. On the line no setting is "
    "both faster and takes less work.",
    "記録した出力上で再生した設定。予測速度と、そのための計算量。線上の設定より速くかつ計算量の少ない設定はない。",
)
WORK = Word("tokens verified per token decoded", "出力1トークンあたりの検証トークン数")
PREDICTED_RATE = Word("predicted tok/s", "予測速度 (tok/s)")
FRONT = Word("front", "フロント")
LIVE_PLOT = Word("Predicted against live", "予測と実測")
LIVE_PLOT_NOTE = Word(
    "Decode rates predicted by replay, and measured live with 95% intervals; on the dashed line they are equal.",
    "再生による予測速度と、実測速度 (95%信頼区間)。破線上で両者が等しい。",
)
LIVE_RATE = Word("measured tok/s", "実測速度 (tok/s)")
EQUAL = Word("equal", "一致")
ERROR = Word("error %", "誤差 (%)")

MADE_WITH = Word("Made with", "計測環境")
MADE_WITH_NOTE = Word(
    "Rates are ratios of sums over prompts; intervals are 95%, by bootstrap over prompts, Wilson's for match; "
    "plain decoding and methods ran interleaved on the same prompts; prefill is outside.",
    "速度はプロンプト全体の合計の比。区間は95%で、プロンプト単位のブートストラップ (一致率は Wilson)。通常デコードと"
    "各手法は同じプロンプトで交互に実行し、プリフィルは含まない。",
)
MACHINE = Word("machine", "マシン")
DTYPE = Word("dtype", "dtype")
THREADS = Word("threads", "スレッド数")
BUILD = Word("runtime build", "ランタイムのビルド")
REVISION = Word("revision", "リビジョン")
MEASURED_AT = Word("measured", "計測日")
UNREADABLE = Word("Left out, unreadable", "読み込めなかったもの")
LANGUAGE_SWITCH = Word("日本語", "English")
