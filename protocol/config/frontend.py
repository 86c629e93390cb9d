"""The configuration of the HTTP server, its chat formats and the logs."""

from functools import partial
from typing import Annotated, Final, Literal

import msgspec

from .option import option
from .parser_names import (
    REASONING_PARSERS_OF_SGLANG,
    REASONING_PARSERS_OF_VLLM,
    TOOL_CALL_PARSERS_OF_SGLANG,
    TOOL_CALL_PARSERS_OF_VLLM,
)
from .weights import WeightTransferConfig

chat = partial(option, group="chat")
logging = partial(option, group="logging")

MAX_VIDEO_FRAMES: Final = 1024
"""The maximum number of frames that a request may read from a video."""

MAX_VIDEO_FPS: Final = 1000.0
"""The maximum number of frames per second."""

_NEVER_S: Final = 1e8
"""More seconds than any stream lasts."""

ContentFormat = Literal["auto", "string", "openai"]
LogFormat = Literal["text", "json"]
SpecialTokenPolicy = Literal["allow", "escape", "refuse"]
ToolCallParserName = Literal[
    "hermes",
    "qwen3",
    "llama3_json",
    "llama4_json",
    "mistral",
    "granite",
    "granite4",
    "pythonic",
    "llama4_pythonic",
    "lfm2",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "minimax_m2",
    "minimax_m3",
    "glm45",
    "glm47",
    "k2_horizon",
    "kimi_k2",
    "kimi_k3",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "gemma4",
    "functiongemma",
    "hunyuan_a13b",
    "longcat",
    "nemotron_json",
    "phi4_mini_json",
    "internlm",
    "granite-20b-fc",
    "gigachat3",
    "gigachat35",
    "xlam",
    "olmo3",
    "step3",
    "hy_v3",
    "hy_v4",
    "apertus",
    "cohere_command",
    "dots",
    "inkling",
    "iquest_q1",
    "minicpm5",
    "muse",
    "plamo3",
    "openai",
    "generic",
]
ReasoningParserName = Literal[
    "deepseek_r1",
    "qwen3",
    "deepseek_v3",
    "deepseek_v4",
    "glm45",
    "k2_horizon",
    "kimi_k2",
    "kimi_k3",
    "minimax_m2",
    "minimax_m3",
    "granite",
    "mistral",
    "kimi_vl",
    "seed_oss",
    "gemma4",
    "openai_gptoss",
    "cohere_command3",
    "cohere_command4",
    "ernie45",
    "hunyuan_a13b",
    "inkling",
    "minimax_m2_append_think",
    "muse",
    "plamo3",
]
ToolCallParserOption = Literal["auto", "none", ToolCallParserName]
ReasoningParserOption = Literal["auto", "none", ReasoningParserName]


class VideoReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frames to read from video files of requests that choose none.

    Attributes:
        num_frames: Their number; -1 for as many as the model accepts.
        fps: Their number per second of the video; 0 for no rate, as in vLLM.
    """

    num_frames: Annotated[int, msgspec.Meta(ge=-1, le=MAX_VIDEO_FRAMES)] | None = None
    fps: Annotated[float, msgspec.Meta(ge=0, le=MAX_VIDEO_FPS)] | None = None


class MediaReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of media files, by kind."""

    video: VideoReading = VideoReading()


class FrontendConfig(msgspec.Struct, frozen=True):
    """The HTTP server, its chat formats, and the logs of every process.

    Attributes:
        default_sampling: Sampling parameters for requests that set none, from the checkpoint and the model options.
    """

    host: Annotated[str, option("Address to listen on; 0.0.0.0 is every interface")] = "127.0.0.1"
    port: Annotated[
        int,
        option("Port to listen on; 0 picks a free one", variable="AIP_HTTP_PORT", ge=0, le=65535),
    ] = 8000
    uds: Annotated[
        str | None, option("Unix socket to listen on instead of TCP", metavar="PATH")
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        option(
            "API keys that clients must send",
            name="--api-key",
            metavar="KEY",
            variable="VLLM_API_KEY",
        ),
        option("File with one API key per line", name="--api-key-file", parse="api_keys_in_file"),
    ] = ()
    admin_api_key: Annotated[
        str | None, option("Key required for operator routes", metavar="KEY")
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        option(
            "Let operators add and remove LoRA adapters over HTTP",
            variable="VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        ),
    ] = False
    weight_transfer_config: Annotated[
        WeightTransferConfig | None,
        option(
            "Let trainers send weights to this server: {backend: gloo, timeout_s}",
            parse="weight_transfer",
        ),
    ] = None
    skip_model_name_validation: Annotated[
        bool,
        option(
            "Answer requests that name a model that is not served",
            variable="VLLM_SKIP_MODEL_NAME_VALIDATION",
        ),
    ] = False
    share_prefix_cache: Annotated[
        bool, option("Share cached prefixes between API keys (timing can reveal others' prompts)")
    ] = False
    root_path: Annotated[
        str,
        option("URL path prefix that a reverse proxy removes", "--fastapi-root-path --api-prefix"),
    ] = ""
    ssl_keyfile: Annotated[
        str | None, option("Private key file for HTTPS", "--ssl-key-file", parse="file")
    ] = None
    ssl_keyfile_password: Annotated[
        str | None, option("Password of an encrypted --ssl-keyfile", metavar="PASSWORD")
    ] = None
    ssl_certfile: Annotated[
        str | None, option("Certificate chain file for HTTPS", "--ssl-cert-file", parse="file")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        option("Certificates of authorities that sign those of clients", parse="file"),
    ] = None
    ssl_cert_reqs: Annotated[
        str | None,
        option(
            "Whether clients must show a certificate of --ssl-ca-certs",
            choices=("none", "optional", "required"),
            synonyms={"0": "none", "1": "optional", "2": "required"},
            default_text="required with --ssl-ca-certs, else none",
        ),
    ] = None
    ssl_ciphers: Annotated[
        str | None,
        option("Ciphers of HTTPS below TLS 1.3, in OpenSSL's format", metavar="CIPHERS"),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, option("Use new certificates when the files change, without a restart")
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        option(
            "Origins of web pages that may call; localhost: local pages",
            "--cors-origins",
            metavar="ORIGIN",
            parse="origins",
            default_text="auto: any, but on a loopback address only local pages",
        ),
    ] = ("auto",)
    allowed_methods: Annotated[
        tuple[str, ...],
        option("HTTP methods that web pages may use", "--cors-methods", metavar="METHOD"),
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...],
        option("Request headers that web pages may send", "--cors-headers", metavar="HEADER"),
    ] = ("*",)
    allow_credentials: Annotated[
        bool, option("Let web pages send cookies and client certificates", "--cors-credentials")
    ] = False
    disable_docs: Annotated[
        bool,
        option("Do not serve /docs and /openapi.json", name="--disable-fastapi-docs"),
    ] = False
    middleware: Annotated[
        tuple[str, ...],
        option(
            "ASGI classes or HTTP functions around all routes, as module.Name",
            metavar="NAME",
            parse="dotted_names",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        option(
            "Host header values to accept; * accepts any",
            metavar="NAME",
            default_text="any, but on a loopback address without API keys only local names",
        ),
    ] = ()
    max_body_bytes: Annotated[
        int, option("Maximum size of a request body, such as 32MiB", ge=1024)
    ] = 32 * 1024 * 1024
    max_request_memory: Annotated[
        int, option("Memory for large requests in each frontend process, such as 256MiB", ge=1024)
    ] = 256 * 1024 * 1024
    max_logprobs: Annotated[
        int, option("Maximum logprobs per token in a request; -1: unlimited", ge=-1)
    ] = 20
    strict: Annotated[bool, option("Reject requests with unknown fields")] = False
    keep_alive_s: Annotated[
        float,
        option("Seconds before an idle connection is closed", name="--timeout-keep-alive", ge=0),
    ] = 5.0
    slow_client_s: Annotated[
        float,
        option(
            "Seconds a client may take to send or read",
            "--timeout -to",
            name="--timeout-slow-client",
            ge=1,
            le=86400,
        ),
    ] = 30.0
    default_max_tokens: Annotated[
        int,
        option(
            "Maximum output tokens of requests that set none",
            ge=0,
            default_text="0: the rest of the context, or what the API specifies",
        ),
    ] = 0
    default_deadline_s: Annotated[
        float, option("Deadline in seconds for requests without X-Request-Timeout; 0: none", ge=0)
    ] = 0.0
    shutdown_timeout_s: Annotated[
        float, option("Seconds that running requests may take to finish during shutdown", ge=0)
    ] = 30.0
    stream_interval: Annotated[int, option("Tokens per event of a streamed response", ge=1)] = 1
    sse_keep_alive_s: Annotated[
        float,
        option(
            "Seconds of silence in a stream before a keep-alive comment; 0: none",
            "--sse-ping-interval",
            name="--sse-keep-alive-interval",
            synonyms={"-1": "0"},
            ge=0,
        ),
    ] = 15.0
    enable_prompt_tokens_details: Annotated[
        bool, option("Report cached prompt tokens in usage")
    ] = True
    enable_per_request_metrics: Annotated[
        bool, option("Report a request's times in its answer, as the field metrics")
    ] = False
    force_include_usage: Annotated[
        bool,
        option(
            "Report usage in every chunk of a stream, whatever its stream_options",
            name="--enable-force-include-usage",
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, option("Write tokens in logprobs as token_id:N unless a request overrides it")
    ] = False
    enable_tokenizer_info: Annotated[
        bool,
        option(
            "Serve tokenizer configuration and chat template at GET /tokenizer_info",
            name="--enable-tokenizer-info-endpoint",
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        chat("Chat template or a file with one, replacing the model's", metavar="TEMPLATE"),
    ] = None
    trust_request_chat_template: Annotated[
        bool, chat("Let requests bring their own `chat_template`")
    ] = False
    chat_template_content_format: Annotated[
        ContentFormat, chat("Format in which the chat template receives message content")
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, object],
        chat(
            "Variables of the chat template for requests that do not set them",
            "--chat-template-kwargs",
            entries={"--reasoning": "enable_thinking", "-rea": "enable_thinking"},
            synonyms={"on": "true", "off": "false"},
        ),
    ] = {}
    stable_prefix: Annotated[
        tuple[str, ...],
        chat(
            "Lines of system prompts to move after the conversation",
            metavar="RULE",
            default_text="none",
        ),
    ] = ()
    special_tokens_in_text: Annotated[
        SpecialTokenPolicy,
        chat("Treatment of special tokens in messages: interpret, escape or refuse them"),
    ] = "allow"
    tool_call_parser: Annotated[
        ToolCallParserOption,
        chat(
            "Format of tool calls; auto: detected from the chat template",
            synonyms=TOOL_CALL_PARSERS_OF_SGLANG | TOOL_CALL_PARSERS_OF_VLLM,
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, chat("Load what tool calls need at start; they are always parsed")
    ] = False
    reasoning_parser: Annotated[
        ReasoningParserOption,
        chat(
            "Format of reasoning; auto: detected from the chat template",
            synonyms=REASONING_PARSERS_OF_SGLANG | REASONING_PARSERS_OF_VLLM,
        ),
    ] = "auto"
    allowed_media_domains: Annotated[
        tuple[str, ...],
        option(
            "Hosts from which images and audio may be downloaded by HTTPS",
            metavar="HOST",
            default_text="only data URLs",
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str | None,
        option(
            "Directory of the images and audio that file URLs may name",
            "--media-path",
            metavar="DIR",
            default_text="none",
        ),
    ] = None
    mcp_servers: Annotated[
        dict[str, str],
        option(
            "MCP servers whose tools responses may call: LABEL=URL",
            parse="mcp_servers",
            metavar="LABEL=URL,…",
            default_text="none",
        ),
    ] = {}
    limit_mm_per_prompt: Annotated[
        dict[str, int],
        option(
            'Maximum images, videos or audio clips of a prompt: {"image": 4}',
            "--limit-mm-data-per-request",
            default_text='{"image": 32, "video": 4, "audio": 32}',
        ),
    ] = {}
    media_io_kwargs: Annotated[
        MediaReading,
        option(
            'Frames to read from video files: {"video": {"num_frames": 32}} or {"fps": 2}',
            parse="media_io",
            metavar="JSON",
            default_text="those of the model",
        ),
    ] = MediaReading()
    enable_mm_embeds: Annotated[
        bool, option("Accept embeddings in place of images; only for trusted clients")
    ] = False
    max_audio_s: Annotated[
        float,
        option("Maximum seconds of an audio file", ge=1, le=86_400, name="--max-audio-seconds"),
    ] = 7200.0
    response_role: Annotated[str, chat("Role of response messages")] = "assistant"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        logging("Lowest severity of messages to log", "--uvicorn-log-level"),
    ] = "info"
    log_format: Annotated[
        LogFormat, logging("Format of log lines; json: one object per line, for log collectors")
    ] = "text"
    log_requests: Annotated[
        bool,
        logging("Log every request", "--log-requests", name="--enable-log-requests"),
        logging(
            "vLLM's name for --no-enable-log-requests", name="--disable-log-requests", value=False
        ),
    ] = False
    log_stats: Annotated[
        bool,
        logging("Periodically log statistics while requests are running"),
        logging("vLLM's name for --no-log-stats", name="--disable-log-stats", value=False),
    ] = True
    log_stats_interval_s: Annotated[
        float, logging("Seconds between log lines with statistics", ge=0.5)
    ] = 10.0
    dump_dir: Annotated[
        str | None,
        logging(
            "Directory for scheduler event dumps; also enables POST /debug/dump",
            metavar="DIR",
            default_text="a private temporary directory",
        ),
    ] = None
    metrics_compat: Annotated[
        tuple[Literal["vllm", "sglang", "llama.cpp"], ...],
        logging("Also publish metrics under another server's names"),
    ] = ()
    otlp_traces_endpoint: Annotated[
        str | None,
        logging(
            "OpenTelemetry collector to which traces of requests are sent",
            metavar="URL",
            default_text="none",
            parse="otlp_endpoint",
            variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = None
    default_sampling: dict[str, float | int] = {}

    @property
    def expects_tools(self) -> bool:
        """True if the operator has asked for tool calls, which are parsed in any case."""
        return self.enable_auto_tool_choice or self.tool_call_parser not in ("auto", "none")

    @property
    def max_silence_s(self) -> float:
        """Seconds of silence in a stream before something is sent, so that proxies keep the connection open."""
        return self.sse_keep_alive_s or _NEVER_S

    @property
    def max_images(self) -> int:
        """The maximum number of images in one prompt."""
        return self.limit_mm_per_prompt.get("image", 32)

    @property
    def max_audio_clips(self) -> int:
        """The maximum number of audio clips in one prompt."""
        return self.limit_mm_per_prompt.get("audio", 32)

    @property
    def max_videos(self) -> int:
        """The maximum number of videos in one prompt."""
        return self.limit_mm_per_prompt.get("video", 4)
