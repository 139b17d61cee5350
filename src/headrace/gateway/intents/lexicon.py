"""Words that tell what a request wants: those of each intent, and those of easy and hard requests."""

from __future__ import annotations

WORDS: dict[str, str] = {
    "chat": """
        hello hi hey thanks thank good morning evening feel feeling recommend suggest advice tips
        favourite favorite weekend dinner lunch capital weather hobby translate translation opinion friend
        hallo bonjour hola danke merci gracias""",
    "summarise": """
        summarise summarize summary summarised summarized tldr tl dr condense condensed shorten recap gist
        digest abstract overview boil bullet bullets headline takeaways takeaway minutes abridge sum
        nutshell synopsis brief zusammenfassung fasse résumé résume resumen""",
    "classify": """
        classify classification categorise categorize category categories label labels sentiment positive
        negative neutral spam ham toxic urgent priority topic tag tags bucket assign which whether genre
        intent rate rating stars yes no true false kategorie""",
    "extract": """
        extract extraction extracted pull parse json csv fields field entities names dates emails email
        phone address addresses amounts amount find list mentioned mentions identify key value values
        table column columns invoice capture collect return""",
    "code": """
        code function class method python javascript typescript java rust golang bash shell sql query
        regex bug debug error exception traceback compile api endpoint script program implement refactor
        unit test tests algorithm array string loop html css react docker kubernetes git commit pandas
        dataframe decorator thread mutex pointer struct""",
    "maths": """
        calculate compute solve equation integral derivative integrate differentiate probability percent
        percentage area volume perimeter triangle circle sum product matrix eigenvalue eigenvalues
        determinant prove theorem prime modulo remainder average mean median variance simplify factor
        roots polynomial limit converge series fraction ratio interest speed""",
    "reasoning": """
        why reason reasoning explain deduce conclude conclusion therefore argue argument trade-offs
        tradeoffs tradeoff pros cons compare plan strategy decide decision logic puzzle riddle evaluate
        assess analyse analyze analysis implications consequences assumption assumptions fallacy
        hypothesis cause causes consistent contradiction liar knight knave scenario weigh justify""",
    "creative": """
        poem story haiku limerick lyrics song sonnet tale fiction character dialogue scene slogan tagline
        brainstorm imagine invent creative write compose fable monologue screenplay novel chapter rhyme
        villain hero blurb ode gedicht poème poema""",
}
"""By the shipped intents; an intent of your own learns from the embedding and from the words of these."""

HARD = """
    prove proof optimise optimize optimal concurrent distributed rigorous derive trade-offs
    tradeoffs detailed thorough comprehensive scalable thread-safe lock-free asymptotic complexity
    edge counterexample assumptions critique multi-step constraints nuanced efficient production
    robust migrate architecture necessary sufficient incentives second-order"""
EASY = "simple quick quickly short brief briefly basic easy just one-line one-liner"
QUESTION = "what who when where which whose how is are do does can could should would did was"
