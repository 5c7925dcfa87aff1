"""Word lists that the checks look words up in."""

from __future__ import annotations

CONJUNCTIONS = frozenset("for and nor but or yet so".split())

PRONOUNS = frozenset(
    """i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself
    we us our ours ourselves they them their theirs themselves themself oneself thou thee thy thine""".split()
)
"""Personal, possessive and reflexive."""

NAMES = frozenset(
    """emma liam sophia jackson olivia noah ava lucas isabella mason mia ethan charlotte alexander amelia benjamin
    harper leo zoe daniel chloe samuel lily matthew grace owen abigail gabriel ella jacob scarlett nathan victoria
    elijah layla nicholas audrey david hannah christopher penelope thomas nora andrew aria joseph claire ryan stella
    jonathan""".split()
)
"""The names that the prompts list."""

STOP_WORDS = frozenset(
    """a about above after again against all am an and any are as at be because been before being below between both
    but by can could did do does doing down during each few for from further had has have having he her here hers
    herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on
    once only or other our ours ourselves out over own same she should so some such than that the their theirs them
    themselves then there these they this those through to too under until up very was we were what when where which
    while who whom why will with would you your yours yourself yourselves don't isn't aren't wasn't weren't hasn't
    haven't hadn't doesn't didn't won't wouldn't shouldn't couldn't it's i'm you're he's she's we're they're i've
    you've we've they've that's""".split()
)

MINOR_WORDS = frozenset(
    """a an the and but or nor for so yet as at by in of off on per to up via vs with from into onto over than that
    if about above across after against along amid among around before behind below beneath beside between beyond
    despite down during except inside like near out outside past since through throughout till toward towards under
    underneath until unto upon within without is are was were be been am do does did has have had it its""".split()
)
"""Words that title case may leave in lower case: articles, conjunctions, prepositions, and (as several styles do)
forms of be, do and have."""

AUXILIARIES = frozenset(
    """am is are was were be been being do does did done have has had having can could shall should will would may
    might must ought let's don't doesn't didn't isn't aren't wasn't weren't can't couldn't won't wouldn't shouldn't
    haven't hasn't hadn't mustn't""".split()
)

IRREGULAR_VERBS = frozenset(
    """arose arisen ate eaten awoke beat became began begun bent bet bit bitten blew blown bore borne bought bound
    bred broke broken brought built burnt burst came caught chose chosen clung crept cut dealt drank drawn dreamt
    drew driven drove drunk dug dug fallen fed fell felt fled flew flown fought found froze frozen gave given gone
    got gotten grew grown heard held hid hidden hit hung kept knew known laid lain lay leapt learnt led left lent lit
    lost made meant met paid put quit ran rang read ridden risen rode rose rung said sang sank sat saw seen sent set
    shaken shone shook shot shown shrank shut slain slept slid sold sought spat spent split spoke spoken spread
    sprang stole stolen stood struck stuck stung sung sunk swam swept swore sworn swum swung taken taught thought
    threw thrown told took tore torn understood went woke woken won wore worn wound wove woven written wrote""".split()
)

VERBS = frozenset(
    """abandon absorb abolish accelerate accept access accompany accomplish account accumulate achieve acknowledge
    acquire act activate adapt add address adhere adjust administer admire admit adopt advance advise advocate affect
    afford aggregate agree aid aim align allocate allow alter amend amplify analyse analyze anchor animate announce
    answer anticipate appeal appear apply appoint appreciate approach approve argue arise arm arrange arrest arrive
    articulate ascend ask aspire assemble assert assess assign assist associate assume assure attach attack attain
    attempt attend attract attribute audit augment automate avoid await awake award back bake balance ban bargain base
    bathe battle bear beat become befriend beg begin behave behold believe belong bend benefit bet bind bite blame
    blend bless blow boast boil bolster boost borrow bounce bow branch break breathe breed bring broadcast browse
    brush build burn burst bury buy calculate call calm capture care carry carve cast catch categorize cause celebrate
    challenge change characterize charge chart chase chat check cheer cherish chew choose circle cite claim clarify
    clash classify clean clear climb cling close coach code collaborate collapse collect combat combine come comfort
    command commence comment commit communicate compare compete compile complain complete comply compose compress
    compute conceal concede conceive concentrate conclude condemn conduct confer confess configure confirm confront
    confuse connect conquer conserve consider consist consolidate constitute constrain construct consult consume
    contact contain contemplate contend continue contract contradict contrast contribute control convene convert
    convey convince cook cool coordinate cope copy correct correlate cost count counter cover craft crash crawl create
    criticize cross crush cry cultivate cure cut cycle dance dare deal debate debug decide declare decline decode
    decorate decrease dedicate deepen defeat defend define defy delay delegate delete deliberate delight deliver delve
    demand demonstrate denote deny depart depend depict deploy derive descend describe deserve design desire destroy
    detail detect determine develop devise devote diagnose dictate die differ differentiate dig digest diminish dip
    direct disagree disappear discern discover discuss disguise dismiss display disrupt dissolve distinguish
    distribute dive divide document dominate donate double doubt draft drag draw dream dress drift drink drive drop
    dry dwell earn ease eat echo edit educate effect elaborate elect elevate eliminate embark embed embody embrace
    emerge emit emphasize employ empower enable enact encapsulate encode encompass encounter encourage end endure
    enforce engage engineer enhance enjoy enlarge enlist ensure entail enter entertain enumerate envision equip
    escape establish estimate evaluate evoke evolve examine exceed exchange exclude execute exemplify exercise exert
    exhibit exist expand expect expedite experience experiment explain exploit explore export expose express extend
    extract face facilitate fade fail fall familiarize fascinate favor fear feature feed feel fetch fight figure file
    fill film filter finalize finance find finish fire fit fix flee float flood flow flourish fly focus fold follow
    forbid force forecast forge forget forgive form formalize format formulate foster found frame free freeze fuel
    fulfill function fund furnish gain gather gauge gaze generalize generate get give glance gleam glimpse glow go
    govern grab grade grant grasp greet grind grip grow guarantee guard guess guide halt handle hang happen harbor
    harness hate haunt head heal hear heat help hesitate hide highlight hike hint hire hit hold honor hope host hover
    hug hunt hurry hurt identify ignite ignore illuminate illustrate imagine imitate immerse impact implement imply
    import impose impress improve include incorporate increase incur indicate induce infer influence inform inherit
    initialize initiate inject innovate input inquire insert insist inspect inspire install instill instruct insulate
    integrate intend intensify interact interpret interrupt intersect intervene introduce invade invent invest
    investigate invite invoke involve isolate issue iterate join journey judge jump justify keep kick kill kiss kneel
    knit knock know label lack land last laugh launch lay lead lean leap learn leave lend let leverage lie lift light
    like limit linger link list listen live load locate lock log long look loom lose love lower maintain make manage
    mandate manifest manipulate manufacture map march mark market marry master match matter maximize mean measure
    meditate meet melt mend mention merge migrate mimic mind minimize mirror miss mitigate mix model moderate modify
    monitor motivate mourn move multiply name narrate navigate need neglect negotiate nest note notice notify nourish
    nurture obey object observe obtain occupy occur offer omit open operate oppose optimize orchestrate order organize
    orient originate outline output overcome overlook oversee owe own pack paint panic park participate partner pass
    pause pay penetrate perceive perform permit persist persuade pick picture pinpoint place plan plant play plead
    please plot plunge point ponder pose position possess post pour practice praise pray predict prefer prepare
    prescribe present preserve press presume pretend prevail prevent print prioritize probe proceed process proclaim
    procure produce profess program progress prohibit project promise promote prompt pronounce propagate propose
    protect protest prove provide provoke publish pull pump punish purchase pursue push put qualify quantify query
    question quit quote race raise rank rate reach react read realize reason reassure rebuild recall receive recite
    recognize recommend reconcile reconsider record recover recreate recruit recycle redefine redesign reduce refactor
    refer refine reflect reform refrain refresh refuse regard register regret regulate reimagine reinforce reject
    relate relax release rely remain remark remember remind remove render renew rent reorganize repair repeat rephrase
    replace replicate reply report represent request require rescue research resemble reserve reshape reside resist
    resolve respect respond rest restate restore restrict restructure result retain rethink retire retreat retrieve
    return reveal reverse review revise revisit revive reward rewrite ride ring rise risk roam roll rotate rule run
    rush sail satisfy save savor say scale scan scatter schedule scrutinize scream screen search secure see seek seem
    seize select sell send sense separate serve set settle shake shape share shatter shed shift shine ship shock shoot
    shout show shrink shut sigh sign signal simplify simulate sing sink sit sketch skip sleep slice slide slip slow
    smell smile soar solve sort sound spark speak specialize specify speculate spell spend spin spot spread spring
    stabilize stage stand standardize stare start state stay steal steer step stick stimulate stop store strain
    strategize stream streamline strengthen stress stretch strike strive structure struggle study submit subscribe
    substitute subtract succeed suffer suggest suit summarize supervise supply support suppose surge surpass surrender
    surround survey survive suspect suspend sustain swallow swap sway swear sweep swim swing switch symbolize
    synthesize tackle tailor take talk target taste teach tear tell tempt tend terminate test thank think thread
    threaten thrive throw tie tighten touch tour trace track trade train transcend transfer transform transition
    translate transmit transport trap travel traverse treat tremble trigger trust try turn twist type uncover
    undergo underline underscore understand undertake unfold unify unite unleash unlock unravel unveil update uphold
    urge use utilize validate value vanish vary verify view visit visualize voice vote wait wake walk wander want warn
    wash watch wave weaken wear weave weep weigh welcome whisper widen win wish witness wonder work worry worship
    wrap wrestle write yearn yield zoom""".split()
)
"""Base forms of common verbs."""

CAPITALS_ABOVE_45 = (
    ("reykjavik",), ("helsinki",), ("oslo",), ("tallinn",), ("stockholm",), ("riga",), ("moscow",), ("copenhagen",),
    ("vilnius",), ("minsk",), ("dublin",), ("berlin",), ("amsterdam",), ("warsaw",), ("london",),
    ("brussels", "city of brussels"), ("kyiv", "kiev"), ("prague",), ("luxembourg", "luxembourg city"), ("paris",),
    ("vienna",), ("bratislava",), ("budapest",), ("vaduz",), ("chisinau",), ("bern", "berne"), ("ljubljana",),
    ("zagreb",),
)  # fmt: skip
"""Capitals of Europe north of 45 degrees, by latitude from 64.1 (Reykjavik) to 45.8 (Zagreb); spellings without
accents."""

AFRICA = (
    ("algeria",), ("angola",), ("benin",), ("botswana",), ("burkina faso",), ("burundi",),
    ("cabo verde", "cape verde"), ("cameroon",), ("central african republic",), ("chad",), ("comoros",),
    ("democratic republic of the congo", "congo, democratic republic of the", "congo (kinshasa)", "dr congo",
     "congo, dr", "democratic republic of congo"),
    ("republic of the congo", "congo", "congo, republic of the", "congo (brazzaville)", "congo republic",
     "republic of congo"),
    ("cote d'ivoire", "ivory coast"), ("djibouti",), ("egypt",), ("equatorial guinea",), ("eritrea",),
    ("eswatini", "swaziland"), ("ethiopia",), ("gabon",), ("gambia", "the gambia", "gambia, the"), ("ghana",),
    ("guinea",), ("guinea-bissau", "guinea bissau"), ("kenya",), ("lesotho",), ("liberia",), ("libya",),
    ("madagascar",), ("malawi",), ("mali",), ("mauritania",), ("mauritius",), ("morocco",), ("mozambique",),
    ("namibia",), ("niger",), ("nigeria",), ("rwanda",), ("sao tome and principe", "sao tome & principe"),
    ("senegal",), ("seychelles",), ("sierra leone",), ("somalia",), ("south africa",), ("south sudan",), ("sudan",),
    ("tanzania",), ("togo",), ("tunisia",), ("uganda",), ("zambia",), ("zimbabwe",),
)  # fmt: skip
"""The 54 countries of Africa; spellings without accents."""


def is_verb(word: str) -> bool:
    """Whether a word can be a verb: a common base form, an inflection of one, or an auxiliary."""
    word = word.casefold().replace("’", "'")
    if word in VERBS or word in AUXILIARIES or word in IRREGULAR_VERBS:
        return True
    return any(stem in VERBS for stem in _stems(word))


def _stems(word: str) -> list[str]:
    """Base forms that `word` may be an inflection of."""
    stems = []
    for ending in ("s", "es", "d", "ed", "ing"):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            stem = word.removesuffix(ending)
            stems += [stem, stem + "e"] if ending == "ing" else [stem]
            if stem.endswith("i"):
                stems.append(stem[:-1] + "y")
            if ending in ("ed", "ing") and len(stem) > 2 and stem[-1] == stem[-2]:
                stems.append(stem[:-1])
            if ending == "ing" and stem.endswith("y"):
                stems.append(stem[:-1] + "ie")
    return stems
